"""Every layout gives the single process's log-probs, losses, gradients and weights; so do packing, token budgets and recomputation.

One world per layout trains several kinds of model for two steps, a kind with many losses for one step with each of them. Gradients are
compared after clipping (to a norm of 0.5), so differences are relative to that; a distributed optimizer's ranks hold shards of the
gradient, there weights are compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_models import (
    VOCAB,
    Spec,
    assert_close,
    assert_metrics,
    exported,
    gradients,
    make_added,
    make_batch,
    make_model,
    make_steps,
    train_step,
)
from ranks import world

from aligner.models.checkpoint import checkpoint
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.collectives import from_rank_0

KINDS = ("ppo", "dpo", "value")
LOSSES = ("objectives", "preferences", "reward_mean", "regression", "steps")
OTHERS = ("reward", "sft", "noisy", "distill", "regression", "steps", "ptx")
WITH_HEAD = (
    "tp2_sp",
    "tp2_sp_distributed_optimizer",
    "pp2",
    "dp2_distributed_optimizer",
    "tp2_cp2_packed",
    "pp2_interleaved",
    "dp2_shared_prompts",
)
WITH_OBJECTIVES = ["dp2", "tp2_cp2_packed", "token_budget"]  # with every loss
PACKED = {"micro_batch_tokens": 48, "packing": True}
SHARED = PACKED | {"share_prompts": True}
ROUTER = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
SP = {"tp": 2, "sequence_parallel": True}
WITH_OTHERS = ["tp2_cp2_packed", "pp2_interleaved", "dp2", "token_budget"]
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
    "tp2_etp2": (2, {"parallel": SP | {"etp": 2}}),
    "pp2_ep2": (4, {"parallel": {"pp": 2, "ep": 2}}),
}
ROUTED = {  # experts chosen by somebody else; four layers, as for an interleaved pipeline
    "tp2_ep2_packed_recompute": {"parallel": SP | {"ep": 2}, "model": PACKED | {"recompute": "full"}},
    "cp2_ep2_packed": {"parallel": {"cp": 2, "ep": 2}, "model": PACKED},
    "pp2_interleaved_recompute": {"parallel": {"pp": 2, "vpp": 2}, "model": {"recompute": "full"}},
    "dp2_shared_prompts": {"model": SHARED},
}


def kinds_of(layout: str) -> list[str]:
    """What the world of a dense layout trains."""
    more = (*KINDS, *(LOSSES if layout in WITH_OBJECTIVES else ()), *(OTHERS if layout in WITH_OTHERS else ()))
    return list(dict.fromkeys((*more, *(["head"] if layout in WITH_HEAD else ()))))


def train(fields: dict, kinds: Sequence[str]) -> dict[str, dict]:
    """Outputs, metrics, gradients and weights of each kind of model; on the first rank."""
    spec = Spec(**fields)
    with world(spec.parallel) as topology:
        found = {kind: train_kind(kind, spec, topology) for kind in kinds}
        return found if dist.get_rank() == 0 else {}


def train_kind(kind: str, spec: Spec, topology) -> dict:
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, distributed=spec.distributed_optimizer, clip_grad=0.5, eps=1e-4)
    model = make_model(kind, spec, topology, optimizer)
    batch = make_batch(kind)
    scores = dict.fromkeys(("reward", "reward_mean", "regression"), "scores") | {"value": "values", "steps": "step_scores"}
    of_two = {"distill": teacher_and_student, "head": both_outputs}
    outputs = partial(of_two[kind], model) if kind in of_two else getattr(model, scores.get(kind, "logprobs"))
    result: dict = {"outputs": [outputs(batch)], "metrics": [], "gradients": []}
    for number, (given, loss) in enumerate(make_steps(kind)):
        if kind == "head" and number and spec.distributed_optimizer:  # the second step is that of a run that was resumed
            model = resumed(model, make_model(kind, spec, topology, optimizer))
            outputs = partial(both_outputs, model)
        result["metrics"].append(train_step(model, given, loss, make_added(kind)))
        if not spec.distributed_optimizer:  # a distributed optimizer's rank holds its own shard of the reduced gradient only
            result["gradients"].append(gradients(model.model.chunks))
    return result | {"weights": exported(model.model.chunks), "outputs": [*result["outputs"], outputs(batch)]}


def both_outputs(model, batch) -> torch.Tensor:
    return torch.stack([*model.per_token(batch, "logprobs", "values").values()])


def resumed(model, fresh):
    """The model once it has gone through a checkpoint."""
    folder = Path(from_rank_0(tempfile.mkdtemp))
    checkpoint.save(folder, model.model, checkpoint.SaveRequest(step=1, state={}))
    checkpoint.load(fresh.model, checkpoint.resolve(folder))
    from_rank_0(lambda: shutil.rmtree(folder))
    return fresh


def teacher_and_student(model, batch) -> torch.Tensor:
    """As a teacher the likeliest tokens and their log-probs, as a student those of the tokens that a teacher named."""
    tokens, logprobs = model.topk(batch, 4, below=VOCAB)
    return torch.cat([tokens.float(), logprobs, model.named_logprobs(batch).topk_logprobs], dim=2)


@pytest.fixture(scope="module")
def run(on_ranks) -> Callable[[int, dict, Sequence[str]], dict[str, dict]]:
    """`run(processes, spec, kinds)`: what a layout makes of these kinds of model; once for all tests."""
    known: dict[str, dict[str, dict]] = {}

    def trained(processes: int, spec: dict, kinds: Sequence[str]) -> dict[str, dict]:
        key = repr((processes, spec, kinds))
        if key not in known:
            known[key] = on_ranks(train, processes, spec, kinds, timeout=400)[0]
        return known[key]

    return trained


def both(layout: str, kind: str, run) -> tuple[dict, dict]:
    processes, spec = DENSE[layout]
    every = [*KINDS, *OTHERS, "head"]
    alone = ({"num_layers": 4}, every) if "num_layers" in spec else ({}, list(dict.fromkeys((*every, *LOSSES))))
    return run(1, *alone)[kind], run(processes, spec, kinds_of(layout))[kind]


def assert_equal(one: dict, many: dict) -> None:
    for expected, got in zip(one["outputs"], many["outputs"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-5)
    assert one["metrics"][0]["optim/grad_norm"] > 0.5  # the comparison is of something
    for expected, got in zip(one["metrics"], many["metrics"], strict=True):
        assert_metrics(got, expected)
    for expected, got in zip(one["gradients"], many["gradients"], strict=bool(many["gradients"])):
        assert_close(got, expected, atol=1e-6)
    assert_close(many["weights"], one["weights"], atol=2e-6)


CASES = [(layout, kind) for layout in DENSE for kind in kinds_of(layout) if kind not in ("objectives", "preferences")]


@pytest.mark.parametrize(("layout", "kind"), CASES, ids=map("-".join, CASES))
def test_layout_equals_single_process(kind, layout, run):
    """Also scores: means over a sequence that may lie on several ranks, one token on one of them, labels of which some are missing,
    others on each replica. An untied output layer is on the last stage alone; of a distilled token K words are looked up in the shards of
    the vocabulary, for every divergence."""
    assert_equal(*both(layout, kind, run))


@pytest.mark.parametrize("layout", WITH_OBJECTIVES)
def test_every_loss_of_a_policy(layout, run):
    """Sequence-level ratios, constants, corrections and KL terms: the same gradient for every micro-batch size, layout and packing."""
    one, many = both(layout, "objectives", run)
    assert len(one["gradients"]) == 7
    assert all(0 < metrics["policy/clip_fraction"] < 1 for metrics in one["metrics"][:5])  # SAPO and REINFORCE have no clipping
    assert_equal(one, many)


@pytest.mark.parametrize("layout", WITH_OBJECTIVES)
def test_losses_on_preferences(layout, run):
    """Sums and means over responses, the supervised term, margins and labels: each counts pairs or responses, whatever the layout. All
    losses of pairs, then KTO and SteerLM 2."""
    one, many = both(layout, "preferences", run)
    assert len(one["gradients"]) == 19
    assert_equal(one, many)


@pytest.mark.parametrize("layout", EXPERTS)
def test_layout_of_experts_equals_single_process(layout, run):
    """With both auxiliary losses on, whose weight must not depend on the layout either; other layouts are in test_expert_layouts.py."""
    base, kinds = {"experts": True, "model": ROUTER}, [*KINDS, "ptx"]
    one, many = run(1, base, kinds), run(EXPERTS[layout][0], base | EXPERTS[layout][1], kinds)
    for kind in kinds:
        assert one[kind]["metrics"][0]["moe/load_balancing_loss"] > 1
        assert_equal(one[kind], many[kind])


def test_experts_on_replicas_with_different_numbers_of_micro_batches(run):
    """Three on one replica and four on the other, which exchange tokens in every pass: fillers keep them in step and count nothing.
    Without the load-balancing loss, which is of micro-batches; the z-loss and the biases count tokens."""
    router = {"router_z_loss_coef": 0.05, "router_bias_update_rate": 0.01}
    base = {"experts": True, "biases": True, "model": router}
    many = run(2, base | {"parallel": {"ep": 2}, "model": router | {"micro_batch_tokens": 24}}, ["ppo"])
    assert_equal(run(1, base, ["ppo"])["ppo"], many["ppo"])


@pytest.mark.parametrize("layout", ROUTED)
def test_replayed_routes_equal_a_single_process(layout, run):
    """Every token finds its own route in every layer, whatever rank, chunk, slot and pass it is in: outputs, gradients and counts."""
    base = FOUR | {"experts": True}
    one, many = run(1, base, ["routed"])["routed"], run(2, base | ROUTED[layout], ["routed"])["routed"]
    seen = [*one["metrics"], *many["metrics"]]
    for metrics in seen:
        assert metrics["rollout/route_mismatch"] == 0 and metrics["rollout/route_replaced"] > 0.5
    shared = {"rollout/route_replaced"} if "shared" in layout else set()  # a shared prompt's routes are counted once
    alike = [side | {"metrics": [{n: v for n, v in step.items() if n not in shared} for step in side["metrics"]]} for side in (one, many)]
    assert_equal(*alike)
