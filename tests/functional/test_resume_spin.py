"""SPIN, killed with SIGKILL while it samples and while it trains, ends with the same weights to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resumed_runs import kept, kill_after, kill_when, same_runs
from training_jobs import Job, checkpoint_steps, run_job, series, tiny_settings, train, write_task

pytestmark = pytest.mark.timeout(600)
TRAIN = train("spin")


def settings(folder: Path) -> list[str]:
    """Iterations of 40 of 48 prompts, twice in 20 steps; their responses in files of ten."""
    records = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(6)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        *(one for one in tiny_settings(folder) if not one.startswith("data.")),
        *(f"data.train={folder / 'sft.jsonl'}", f"data.validation={folder / 'sft.jsonl'}", "data.max_length=16"),
        *("data.max_prompt_length=8", "algorithm.batch_size=4", "algorithm.epochs_per_iteration=2", "algorithm.sampled_together=10"),
        *("algorithm.prompts_per_iteration=40", "loop.max_steps=50", "loop.save_every=7", "loop.validate_every=10"),
    ]


def test_killed_at_several_points(tmp_path: Path) -> None:
    write_task(tmp_path)
    whole, killed, common = tmp_path / "whole", tmp_path / "killed", settings(tmp_path)
    run_job(TRAIN, whole, common)
    assert [len(list(folder.iterdir())) for folder in sorted((whole / "spin").iterdir())] == [4, 4, 4]  # 40 responses in parts of ten
    with Job(TRAIN, killed, common) as job:  # while it samples the first iteration
        kill_when(job, lambda: kept(killed, "spin"))
    with Job(TRAIN, killed, common) as job:  # at the turn: as the policy becomes the reference, or answers the first prompts
        kill_after(job, 20)
    with Job(TRAIN, killed, common) as job:  # in the middle of the second
        kill_after(job, 31)
    assert "resumed after step" in run_job(TRAIN, killed, common)
    same_runs(killed, whole, 50)
    assert kept(killed, "spin") == kept(whole, "spin")
    assert checkpoint_steps(killed / "checkpoints" / "reference")[-1] == 40
    assert set(series(whole, "spin/iteration")) == {1.0, 2.0, 3.0}
    margins = series(whole, "preference/margin")
    assert all(abs(margins[step]) < 1e-6 for step in (0, 20, 40)) and margins[19] > 0.1  # at first the policy is its own reference
