"""Every layout gives the single process's log-probs, losses, gradients and weights; so do packing, token budgets and recomputation.

One job per layout trains all kinds of model for two steps, and in some a policy for one step with each of its losses. Gradients are
compared after clipping (to a norm of 0.5), so differences are relative to that; a distributed optimizer's ranks hold shards of the
gradient, there weights are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent / "layout_job.py"
KINDS = ["ppo", "dpo", "value"]
SCORES = ["reward_mean", "regression", "steps"]
WITH_OBJECTIVES = ["dp2", "tp2_cp2_packed", "token_budget"]  # layouts whose jobs train with every other loss too
PACKED = {"micro_batch_tokens": 48, "packing": True}
SHARED = PACKED | {"share_prompts": True}
ROUTER = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
SP = {"tp": 2, "sequence_parallel": True}
OTHERS = ["reward", "sft", "distill", "regression", "steps"]
FOUR = {"num_layers": 4}  # instead of two: several to a pipeline stage, or one to each of its chunks

DENSE = {  # name: (processes, what differs from the single process)
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2_sp": (2, {"parallel": SP}),
    "tp2_sp_distributed_optimizer": (2, {"parallel": SP, "distributed_optimizer": True}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2_interleaved": (2, FOUR | {"parallel": {"pp": 2, "vpp": 2}}),
    "pp2_uneven": (2, FOUR | {"parallel": {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "dp2": (2, {}),
    "dp2_distributed_optimizer": (2, {"distributed_optimizer": True}),
    "tp2_pp2": (4, {"parallel": {"tp": 2, "pp": 2}}),
    "tp2_cp2": (4, {"parallel": SP | {"cp": 2}}),
    "pp2_dp2": (4, {"parallel": {"pp": 2}}),
    "tp2_pp2_dp2": (8, FOUR | {"parallel": SP | {"pp": 2}}),
    "tp2_pp2_dp2_distributed_optimizer": (8, {"parallel": SP | {"pp": 2}, "distributed_optimizer": True}),
    "tp2_cp2_dp2": (8, {"parallel": SP | {"cp": 2}}),
    # Micro-batches by tokens, padded or packed, and recomputation.
    "packed": (1, {"model": PACKED}),
    "token_budget": (1, {"model": {"micro_batch_tokens": 48}}),
    "recompute_selective": (1, {"model": {"recompute": "selective"}}),
    "dp2_shared_prompts": (2, {"model": SHARED}),
    "tp2_pp2_shared_prompts": (4, {"parallel": SP | {"pp": 2}, "model": SHARED}),
    "tp2_cp2_packed": (4, {"parallel": SP | {"cp": 2}, "model": PACKED}),
    "pp2_interleaved_packed_recompute": (
        2,
        FOUR | {"parallel": {"pp": 2, "vpp": 2}, "model": PACKED | {"recompute": "full"}},
    ),
}
EXPERTS = {
    "ep2": (2, {"parallel": {"ep": 2}}),
    "tp2_etp2": (2, {"parallel": SP | {"etp": 2}}),
    "tp2_ep2": (4, {"parallel": SP | {"ep": 2}}),
    "cp2_ep2": (2, {"parallel": {"cp": 2, "ep": 2}}),
    "pp2_ep2": (4, {"parallel": {"pp": 2, "ep": 2}}),
}

ROUTED = {  # experts chosen by somebody else; four layers, as for an interleaved pipeline
    "tp2_ep2_packed_recompute": {"parallel": SP | {"ep": 2}, "model": PACKED | {"recompute": "full"}},
    "cp2_ep2_packed": {"parallel": {"cp": 2, "ep": 2}, "model": PACKED},
    "pp2_interleaved_recompute": {"parallel": {"pp": 2, "vpp": 2}, "model": {"recompute": "full"}},
    "dp2_shared_prompts": {"model": SHARED},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {}


def _run(results, run_distributed, tmp_path: Path, processes: int, spec: dict) -> dict:
    """What the job gave for a layout; it runs once per layout, for all kinds."""
    key = json.dumps([processes, spec])
    if key not in results:
        output = tmp_path / "result.pt"
        run_distributed(JOB, processes, json.dumps(spec), output, timeout=400)
        results[key] = torch.load(output)
    return results[key]


def _single(spec: dict, kinds: list[str]) -> dict:
    """What a layout is compared with: a model of the same size in one process."""
    return {"kinds": kinds} | {name: spec[name] for name in ("num_layers",) if name in spec}


def _of(layout: str, kind: str, results, run_distributed, tmp_path: Path) -> tuple[dict, dict]:
    """What one process and a dense layout make of a kind of model; each job trains several kinds."""
    processes, spec = DENSE[layout]
    kinds = [*KINDS, "objectives", "preferences", *SCORES]
    one = _run(results, run_distributed, tmp_path, 1, _single(spec, KINDS if "num_layers" in spec else kinds))
    many = _run(results, run_distributed, tmp_path, processes, spec | {"kinds": kinds if layout in WITH_OBJECTIVES else KINDS})
    return one[kind], many[kind]


def _assert_equal(one: dict, many: dict) -> None:
    for before, after in ((0, 0), (1, 1)):
        torch.testing.assert_close(many["outputs"][after], one["outputs"][before], rtol=1e-4, atol=5e-5)
    assert one["metrics"][0]["optim/grad_norm"] > 0.5  # the comparison is of something
    for expected, got in zip(one["metrics"], many["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=2e-5, abs=2e-6)
    for expected, got in zip(one["gradients"], many["gradients"], strict=bool(many["gradients"])):
        assert expected.keys() == got.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"gradient of {name}: {m}")
    assert one["weights"].keys() == many["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(many["weights"][name], weight, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"weight {name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", DENSE)
def test_layout_equals_single_process(kind, layout, results, run_distributed, tmp_path):
    _assert_equal(*_of(layout, kind, results, run_distributed, tmp_path))


@pytest.mark.parametrize("layout", WITH_OBJECTIVES)
def test_every_loss_of_a_policy(layout, results, run_distributed, tmp_path):
    """Sequence-level ratios, constants, corrections and KL terms: the same gradient for every micro-batch size, layout and packing."""
    one, many = _of(layout, "objectives", results, run_distributed, tmp_path)
    assert len(one["gradients"]) == 7
    assert all(0 < metrics["policy/clip_fraction"] < 1 for metrics in one["metrics"][:5])  # SAPO and REINFORCE have no clipping
    _assert_equal(one, many)


@pytest.mark.parametrize("layout", WITH_OBJECTIVES)
def test_losses_on_preferences(layout, results, run_distributed, tmp_path):
    """Sums and means over responses, the supervised term, margins and labels: each counts pairs or responses, whatever the layout. All
    losses of pairs, then KTO and SteerLM 2."""
    one, many = _of(layout, "preferences", results, run_distributed, tmp_path)
    assert len(one["gradients"]) == 19
    _assert_equal(one, many)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("layout", WITH_OBJECTIVES)
def test_losses_of_scores(kind, layout, results, run_distributed, tmp_path):
    """Means over a sequence that may lie on several ranks; labels some of which are missing, in other numbers on each replica; steps."""
    _assert_equal(*_of(layout, kind, results, run_distributed, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", EXPERTS)
def test_layout_of_experts_equals_single_process(kind, layout, results, run_distributed, tmp_path):
    """With both auxiliary losses on, whose weight must not depend on the layout either."""
    base = {"experts": True, "model": ROUTER, "kinds": KINDS}
    processes, spec = EXPERTS[layout]
    one = _run(results, run_distributed, tmp_path, 1, base)
    many = _run(results, run_distributed, tmp_path, processes, base | spec)
    assert one[kind]["metrics"][0]["moe/load_balancing_loss"] > 1
    _assert_equal(one[kind], many[kind])


def test_experts_on_replicas_with_different_numbers_of_micro_batches(results, run_distributed, tmp_path):
    """Three on one replica and four on the other, which exchange tokens in every pass: fillers keep them in step and count nothing.
    Without the load-balancing loss, which is of micro-batches; the z-loss and the biases count tokens."""
    router = {"router_z_loss_coef": 0.05, "router_bias_update_rate": 0.01}
    base = {"experts": True, "biases": True, "kinds": ["ppo"], "model": router}
    one = _run(results, run_distributed, tmp_path, 1, base)
    many = _run(results, run_distributed, tmp_path, 2, base | {"parallel": {"ep": 2}, "model": router | {"micro_batch_tokens": 24}})
    _assert_equal(one["ppo"], many["ppo"])


@pytest.mark.parametrize("layout", ROUTED)
def test_replayed_routes_equal_a_single_process(layout, results, run_distributed, tmp_path):
    """Every token finds its own route in every layer, whatever rank, chunk, slot and pass it is in: outputs, gradients and counts."""
    base = FOUR | {"experts": True, "kinds": ["routed"]}
    one = _run(results, run_distributed, tmp_path, 1, base)["routed"]
    many = _run(results, run_distributed, tmp_path, 2, base | ROUTED[layout])["routed"]
    for metrics in (*one["metrics"], *many["metrics"]):
        assert metrics["rollout/route_mismatch"] == 0 and metrics["rollout/route_replaced"] > 0.5
    if "shared" in layout:  # a shared prompt's routes are counted once
        for metrics in (*one["metrics"], *many["metrics"]):
            del metrics["rollout/route_replaced"]
    _assert_equal(one, many)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("layout", ["tp2_cp2_packed", "pp2_interleaved", "dp2"])
def test_other_kinds_of_model(kind, layout, results, run_distributed, tmp_path):
    """Scores come from one token on one context-parallel rank; an untied output layer is on the last stage alone; of a distilled token K
    words are looked up in the shards of the vocabulary, for every divergence."""
    processes, spec = DENSE[layout]
    one = _run(results, run_distributed, tmp_path, 1, _single(spec, OTHERS))
    _assert_equal(one[kind], _run(results, run_distributed, tmp_path, processes, spec | {"kinds": OTHERS})[kind])
