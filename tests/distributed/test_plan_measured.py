"""The planner's sizes against those of real models: training state to the byte, activations within 20 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import cases

JOB = Path(__file__).parent / "plan_job.py"
LAYOUTS = {
    "single": {"ranks": 1},
    "single_plain_optimizer": {"ranks": 1, "optimizer": {"distributed": False}},
    "single_bf16": {"ranks": 1, "dtype": "bfloat16"},
    "full_recompute": {"ranks": 1, "recompute": "full"},
    "untied": {"ranks": 1, "tied": False},
    "tp2": {"ranks": 2, "parallel": {"tp": 2}},
    "tp2_sp": {"ranks": 2, "parallel": {"tp": 2, "sequence_parallel": True}},
    "tp2_sp_adapters": {"ranks": 2, "parallel": {"tp": 2, "sequence_parallel": True}, "rank": 4},
    "pp2": {"ranks": 2, "parallel": {"pp": 2}},
    "pp2_interleaved": {"ranks": 2, "parallel": {"pp": 2, "vpp": 2}},
    "cp2": {"ranks": 2, "parallel": {"cp": 2}},
    "dp2": {"ranks": 2},
    "dp2_plain_optimizer": {"ranks": 2, "optimizer": {"distributed": False}},
    "dp2_bf16": {"ranks": 2, "dtype": "bfloat16"},
    "dp2_critic": {"ranks": 2, "head": "scalar"},
    "ep2": {"ranks": 2, "experts": True, "parallel": {"ep": 2}},
    "tp2_pp2": {"ranks": 4, "parallel": {"tp": 2, "pp": 2}},
}


SPECS = {name: {"rows": 8, **layout} for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def plans() -> dict[str, dict]:
    return {}


FAST = ("single", "full_recompute", "tp2_sp", "tp2_sp_adapters", "pp2_interleaved", "cp2", "dp2", "dp2_critic", "ep2")


@pytest.mark.parametrize("name", cases(SPECS, fast=FAST))
def test_sizes_are_the_real_ones(name: str, plans, run_distributed, tmp_path: Path, request) -> None:
    if not plans:  # one process plans all that are chosen
        chosen = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
        given = {name: SPECS[name] for name in SPECS if name in chosen}
        run_distributed(JOB, 1, "predict", json.dumps(given), tmp_path, timeout=300)
        plans.update(json.loads((tmp_path / "plan.json").read_text()))
    plan, spec = plans[name], SPECS[name]
    run_distributed(JOB, spec["ranks"], "measure", json.dumps(spec), tmp_path, timeout=240)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(spec["ranks"])]
    for rank in ranks:
        stage = rank["stage"]
        assert plan["parameters"][stage] == rank["parameters"]
        exact = plan["state"][f"{stage}/{rank['replica']}"]
        assert {key: rank[key] for key in exact} == exact
        assert rank["gathered"] == plan["gathered"] and bool(rank["gathered"]) == (name == "tp2_sp")
        assert plan["activations"][stage] == pytest.approx(rank["peak"], rel=0.2)
    for stage, fullest in enumerate(plan["fullest"]):
        own = [rank for rank in ranks if rank["stage"] == stage]
        assert fullest == {key: max(rank[key] for rank in own) for key in fullest}
