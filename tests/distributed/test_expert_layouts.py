"""Experts in every pair of layouts, on padded and on packed rows: the auxiliary losses, the biases that follow the load, and all gradients
are those of a single process, and would not be if a rank took padding for tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import experts_job as job
import pytest
import torch
from tiers import cases

FOLDER = Path(__file__).parent
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


@pytest.fixture(scope="module")
def one(topology) -> dict[bool, dict]:
    """What a single process makes of padded rows, and of packed ones (True)."""
    return {packed: job.both({}, PACKED if packed else {}, topology) for packed in (False, True)}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts") / "found.pt"


@pytest.fixture
def many(found, run_distributed, request) -> dict[str, dict]:
    """What four processes make of it, layout by layout; the job runs once, on those that tests were chosen of."""
    if not found.exists():
        found.write_text("")  # a job that fails once is not run for every test
        chosen = {item.callspec.params["layout"] for item in request.session.items if item.path == request.path}
        given = {name: LAYOUTS[name] for name in LAYOUTS if name in chosen}
        run_distributed(FOLDER / "experts_job.py", 4, json.dumps(given), found, timeout=600)
    return torch.load(found)


@EACH
def test_experts_equal_a_single_process(layout, one, many):
    expected, got = one[layout.endswith("packed")], many[layout]
    assert expected["metrics"]["moe/load_balancing_loss"] > 1
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=2e-5, abs=2e-6)
    assert expected["gradients"].keys() == got["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            got["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"gradient of {name}: {m}"
        )
    assert len(expected["biases"]) == 4
    for name, bias in expected["biases"].items():
        assert bias.abs().max() > 0.005  # it has moved
        torch.testing.assert_close(got["biases"][name], bias, rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@EACH
def test_padding_taken_for_tokens_would_show(layout, many):
    """In the router's gradient of every layer, so that equal numbers above are no accident."""
    right, wrong = many[layout], many[layout]["unmasked"]
    routers = [name for name in right["gradients"] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4
    for name in routers:
        difference = (right["gradients"][name] - wrong["gradients"][name]).norm() / right["gradients"][name].norm()
        assert difference > 1e-2, f"{name}: {difference}"
