"""GRPO over two data-parallel ranks with rollouts that are sampled ahead: it trains, validates, ends, and goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from training_jobs import SAYS_77, grpo_settings, launcher, run_job, series, steps_of, write_task

pytestmark = pytest.mark.timeout(300)


def test_ends_and_goes_on(tmp_path: Path) -> None:
    write_task(tmp_path)
    settings = [
        *grpo_settings(tmp_path),
        *SAYS_77,
        *("num_processes=2", "rollout.asynchronous.max_staleness=1", "rollout.asynchronous.recompute=true"),
        *(f"data.validation={tmp_path / 'prompts.jsonl'}", "loop.validate_every=2"),
    ]
    run = tmp_path / "run"
    said = run_job(launcher("grpo"), run, [*settings, "loop.max_steps=3", "run.export_hf=false"])
    assert "warning: algorithm.correction.kind=none with rollout.asynchronous.max_staleness=1" in said
    said = run_job(launcher("grpo"), run, [*settings, "loop.max_steps=5", "algorithm.correction.kind=tis", "run.allow_changes=true"])
    assert "resumed after step 3" in said and "correction.kind=none" not in said
    assert steps_of(run) == [1, 2, 3, 4, 5]
    # The first step after a start has nothing that was sampled ahead; two updates make a step.
    assert series(run, "rollout/staleness_max") == [0, 1, 1, 0, 1]
    assert max(series(run, "rollout/versions")) <= 2 and len(series(run, "time/generate")) == 5
