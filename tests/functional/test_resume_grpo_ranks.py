"""GRPO over two data-parallel ranks with the distributed optimizer: one rank is killed, and the resumed run equals one that lost none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from resumed_runs import optimizer_and_weights, same_tensors, weights
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
    without_times,
    write_task,
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a run that was left alone and of one whose second rank was killed after step 3."""
    folder = tmp_path_factory.mktemp("resume_grpo")
    write_task(folder)
    whole, killed = folder / "whole", folder / "killed"
    run_job(LAUNCH, whole, settings(folder, 0.0))
    with Job(LAUNCH, killed, settings(folder, 0.3)) as job:
        job.reached(3)
        ranks = sorted(pid for pid, command in job.processes().items() if "aligner.cli train grpo" in command)
        kill(ranks[1])
        assert job.wait() != 0
        assert eventually(lambda: not job.processes(), 60.0)  # the launcher ended the other rank
    assert checkpoint_steps(killed / "checkpoints" / "policy") == [2]
    assert "resumed after step 2" in run_job(LAUNCH, killed, settings(folder, 0.0))
    return whole, killed


def test_the_policies_are_equal_to_the_last_bit(runs: tuple[Path, Path]) -> None:
    whole, killed = runs
    assert weights(killed) == weights(whole)
    last = f"checkpoints/policy/step_{NUM_STEPS:06d}"
    same_tensors(optimizer_and_weights(killed / last), optimizer_and_weights(whole / last))


def test_the_metrics_are_equal(runs: tuple[Path, Path]) -> None:
    whole, killed = runs
    assert steps_of(killed) == list(range(1, NUM_STEPS + 1))
    assert without_times(killed) == without_times(whole)
