"""The search of a small job finds what planning every job that it may choose finds, and writes a config that plans the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "plan_search_job.py"


@pytest.mark.slow
def test_the_best_of_everything(run_distributed, tmp_path: Path):
    out = run_distributed(JOB, 1, tmp_path, timeout=400)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["found"] <= 1.02 * found["best"], (found["found_settings"], found["best_settings"])
    assert found["codes"] == [0, 0, 2, 1], out
    best = found["written"]["best"]
    assert best["gpus"] <= 4 and best["hours"] == pytest.approx(best["step_seconds"] * 20 / 3600)
    # The written config plans the same figures, and its script starts as many ranks.
    assert found["again"]["step_seconds"] == pytest.approx(best["step_seconds"]) and found["again"]["fits"]
    assert found["again"]["components"]["actor"]["ranks"] == best["gpus"]
    script = (tmp_path / "grpo_4_gpus.sub").read_text()
    assert "#SBATCH" in script and "grpo_4_gpus" in script
    fronts = [row["step_seconds"] for row in found["written"]["pareto"]]
    assert fronts == sorted(fronts, reverse=True)
