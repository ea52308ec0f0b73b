"""GRPO over two data-parallel ranks with the distributed optimizer: one rank is killed, and the resumed run equals one that lost none."""

from __future__ import annotations

from pathlib import Path

import pytest
from resumed_runs import same_runs
from training_jobs import (
    Job,
    checkpoint_steps,
    eventually,
    grpo_settings,
    kill,
    launcher,
    run_job,
    slow_reward,
    steps_of,
)

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 5
LAUNCH = launcher("grpo")


def settings(folder: Path, reward_seconds: float) -> list[str]:
    """Cosine decay, two updates a step, 24 of 64 prompts a step, a save every two."""
    return [
        *(setting for setting in grpo_settings(folder) if not setting.startswith(("optimizer.decay=", "algorithm.prompts_per_step="))),
        *("algorithm.prompts_per_step=24", "algorithm.mini_batch_size=96", "optimizer.decay=cosine", "num_processes=2"),
        *(f"loop.max_steps={NUM_STEPS}", "loop.save_every=2"),
        slow_reward(folder, reward_seconds),
    ]


def test_the_second_rank_killed_after_step_3(task: Path) -> None:
    whole, killed = task / "whole", task / "killed"
    run_job(LAUNCH, whole, settings(task, 0.0))
    with Job(LAUNCH, killed, settings(task, 0.3)) as job:
        job.reached(3)
        ranks = sorted(pid for pid, command in job.processes().items() if "aligner.cli train grpo" in command)
        kill(ranks[1])
        assert job.wait() != 0
        assert eventually(lambda: not job.processes(), 60.0)  # the launcher ended the other rank
    assert checkpoint_steps(killed / "checkpoints" / "policy") == [2]
    assert "resumed after step 2" in run_job(LAUNCH, killed, settings(task, 0.0))
    assert steps_of(killed) == list(range(1, NUM_STEPS + 1))
    same_runs(killed, whole, NUM_STEPS)
