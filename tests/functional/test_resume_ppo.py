"""PPO with a critic server and a reward server, killed with SIGKILL and resumed, equals one that was not: policy, critic and metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from resumed_runs import kill_after, optimizer_and_weights, same_tensors, weights
from training_jobs import (
    Job,
    checkpoint_steps,
    launcher,
    ppo_settings,
    run_job,
    series,
    slow_reward,
    steps_of,
    without_times,
    write_task,
)

pytestmark = [pytest.mark.pytriton, pytest.mark.timeout(600)]
NUM_STEPS = 5
LAUNCH = launcher("ppo")


def settings(folder: Path, reward_seconds: float) -> list[str]:
    """Adaptive KL that moves at every step, cosine decay of both models, two epochs of updates, 24 of 64 prompts a step."""
    replaced = ("algorithm.", "optimizer.decay=", "critic.optimizer.decay=", "critic.mini_batch_size=")
    return [
        *(setting for setting in ppo_settings(folder) if not setting.startswith(replaced)),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2", "critic.mini_batch_size=12"),
        *("algorithm.kl_coef=0.01", "algorithm.kl_target=0.02", "algorithm.kl_horizon=100"),
        *("optimizer.decay=cosine", "critic.optimizer.decay=cosine"),
        *(f"loop.max_steps={NUM_STEPS}", "loop.save_every=2"),
        slow_reward(folder, reward_seconds),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a run that was left alone and of one that was killed after step 3, whose last checkpoint is of step 2."""
    folder = tmp_path_factory.mktemp("resume_ppo")
    write_task(folder)
    whole, killed = folder / "whole", folder / "killed"
    run_job(LAUNCH, whole, settings(folder, 0.0))
    with Job(LAUNCH, killed, settings(folder, 0.3)) as job:
        kill_after(job, 3)
    assert checkpoint_steps(killed / "checkpoints" / "policy") == checkpoint_steps(killed / "checkpoints" / "critic") == [2]
    output = run_job(LAUNCH, killed, settings(folder, 0.0))
    assert "resumed after step 2" in output and "critic: resumed after step 2" in output
    return whole, killed


def test_the_policies_are_equal_to_the_last_bit(runs: tuple[Path, Path]) -> None:
    whole, killed = runs
    assert weights(killed) == weights(whole)


@pytest.mark.parametrize("component", ["policy", "critic"])
def test_the_last_checkpoints_hold_the_same_weights_and_moments(runs: tuple[Path, Path], component: str) -> None:
    whole, killed = (optimizer_and_weights(run / "checkpoints" / component / f"step_{NUM_STEPS:06d}") for run in runs)
    same_tensors(killed, whole)


def test_the_metrics_are_equal(runs: tuple[Path, Path]) -> None:
    """Also the adaptive coefficient's path, and what the critic says of the step before a checkpoint."""
    whole, killed = runs
    assert steps_of(killed) == list(range(1, NUM_STEPS + 1))
    assert without_times(killed) == without_times(whole)
    assert len(set(series(whole, "policy/kl_coef"))) == NUM_STEPS
    losses = [line["critic/loss"] for line in without_times(whole)[1:]]  # of the step before, saved in between or not
    assert len(set(losses)) == NUM_STEPS - 1
