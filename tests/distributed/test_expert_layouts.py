"""Experts in every pair of layouts, on padded and on packed rows: the auxiliary losses, the biases that follow the load, and all gradients
are those of a single process, and would not be if a rank took padding for tokens."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layout_models import Spec, assert_close, assert_metrics, exported, gradients, make_batch, make_losses, make_model, train_step
from ranks import joined, laid_out
from tiers import cases

from aligner.models.training import forward
from aligner.models.training.optimizer import OptimizerConfig

PACKED = {
    "micro_batch_tokens": 64,
    "packing": True,
}  # with which rows that are rounded up for context parallelism lie together as others do
SP = {"tp": 2, "sequence_parallel": True}
PADDED_LAYOUTS: dict[str, dict[str, Any]] = {  # of four ranks; what tp, pp and cp leave of them are replicas
    "tp2_sp_pp2_ep2": SP | {"pp": 2, "ep": 2},
    "pp2_vpp2_cp2_ep2": {"pp": 2, "vpp": 2, "cp": 2, "ep": 2},
    "tp2_sp_cp2_etp2": SP | {"cp": 2, "etp": 2},
    "ep2_dp4": {"ep": 2},
}
FAST = {*PADDED_LAYOUTS, "tp2_sp_pp2_ep2_packed", "pp2_vpp2_cp2_ep2_packed"}
PADDED_LAYOUTS |= {  # not ep with etp: ranks then gather unequal numbers of tokens, which gloo cannot
    "tp2_sp_pp2_etp2": SP | {"pp": 2, "etp": 2},
    "tp2_sp_pp2_vpp2_etp2": SP | {"pp": 2, "vpp": 2, "etp": 2},
    "tp2_sp_cp2_ep2": SP | {"cp": 2, "ep": 2},
    "tp2_sp_cp2_ep4": SP | {"cp": 2, "ep": 4},
    "tp2_sp_ep2_dp2": SP | {"ep": 2},
    "tp2_sp_etp2_dp2": SP | {"etp": 2},
    "pp2_ep2_dp2": {"pp": 2, "ep": 2},
    "pp2_dp2": {"pp": 2},
    "cp2_ep2_dp2": {"cp": 2, "ep": 2},
    "cp2_dp2": {"cp": 2},
    "cp4_ep2": {"cp": 4, "ep": 2},
    "ep4": {"ep": 4},
}
LAYOUTS = {name: (parallel, {}) for name, parallel in PADDED_LAYOUTS.items()}
# Replicas would pack other rows together, whose load-balancing loss is another.
LAYOUTS |= {f"{name}_packed": (parallel, PACKED) for name, parallel in PADDED_LAYOUTS.items() if "_dp" not in name and "4" not in name}
EACH = pytest.mark.parametrize("layout", cases(LAYOUTS, fast=FAST))

ROUTER = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.05, "router_bias_update_rate": 0.01}


@contextmanager
def padding_is_taken_for_tokens():
    real = forward._padding
    with mock.patch.object(forward, "_padding", lambda part, model: torch.zeros_like(real(part, model))):
        yield


def step(parallel: dict, settings: dict, topology) -> dict:
    """What one training step with every auxiliary loss and moving biases reports, its gradients, and the biases behind it."""
    spec = Spec(parallel=parallel, model=ROUTER | settings, experts=True, biases=True, num_layers=4)
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, distributed=False, clip_grad=0.0, eps=1e-4)
    model = make_model("ppo", spec, topology, optimizer)
    metrics = train_step(model, make_batch("ppo"), make_losses("ppo")[0])
    chunks = model.model.chunks
    biases = {name: tensor for name, tensor in exported(chunks).items() if name.endswith("e_score_correction_bias")}
    return {"metrics": metrics, "gradients": gradients(chunks), "biases": biases}


def both(parallel: dict, settings: dict, topology) -> dict:
    """The step, and the same one with padding taken for tokens."""
    found = step(parallel, settings, topology)
    with padding_is_taken_for_tokens():
        return found | {"unmasked": step(parallel, settings, topology)}


def in_every_layout(layouts: dict) -> dict[str, dict]:
    """`both`, layout by layout of one world; on the first rank."""
    results = {}
    with joined():
        for name, (parallel, settings) in layouts.items():
            print(f"layout {name}", flush=True)  # which one an error is of
            with laid_out(parallel, seed=1) as topology:  # the single process's
                results[name] = both(parallel, settings, topology)
        return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def one(topology) -> dict[bool, dict]:
    return {packed: both({}, PACKED if packed else {}, topology) for packed in (False, True)}


@pytest.fixture(scope="module")
def many(on_ranks, request) -> dict[str, dict]:
    chosen = {item.callspec.params["layout"] for item in request.session.items if item.path == request.path}
    return on_ranks(in_every_layout, 4, {name: LAYOUTS[name] for name in LAYOUTS if name in chosen}, timeout=600)[0]


@EACH
def test_experts_equal_a_single_process(layout, one, many):
    expected, got = one[layout.endswith("packed")], many[layout]
    assert expected["metrics"]["moe/load_balancing_loss"] > 1
    assert_metrics(got["metrics"], expected["metrics"])
    assert_close(got["gradients"], expected["gradients"], atol=1e-6)
    assert len(expected["biases"]) == 4 and all(bias.abs().max() > 0.005 for bias in expected["biases"].values())  # they have moved
    assert_close(got["biases"], expected["biases"], rtol=0, atol=1e-7)


@EACH
def test_padding_taken_for_tokens_would_show(layout, many):
    """In the router's gradient of every layer, so that equal numbers above are no accident."""
    right, wrong = many[layout], many[layout]["unmasked"]
    routers = [name for name in right["gradients"] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4
    for name in routers:
        difference = (right["gradients"][name] - wrong["gradients"][name]).norm() / right["gradients"][name].norm()
        assert difference > 1e-2, f"{name}: {difference}"
