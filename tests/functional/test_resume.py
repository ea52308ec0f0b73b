"""A run that was stopped, killed and resumed equals one that was not, to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from resumed_runs import same_runs, weights
from training_jobs import Job, checkpoint_steps, grpo_settings, run_job, slow_reward, steps_of, train, without_times

pytestmark = pytest.mark.timeout(600)
TRAIN = train("grpo")


def settings(task: Path, *, max_steps: int = 6) -> list[str]:
    """Cosine decay over six steps of two updates, whatever part of them is run; 24 of 64 prompts a step: step 3 straddles two epochs."""
    own = ("algorithm.prompts_per_step=24", "optimizer.decay=cosine", "optimizer.decay_steps=12", f"loop.max_steps={max_steps}")
    return [*grpo_settings(task), *own]


def killed(job: Job, step: int) -> None:
    job.reached(step)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()


@pytest.fixture(scope="module")
def uninterrupted(task: Path) -> Path:
    run_job(TRAIN, task / "uninterrupted", [*settings(task), slow_reward(task, 0.0)])
    return task / "uninterrupted"


def test_three_steps_and_three_more_equal_six(task: Path, uninterrupted: Path) -> None:
    run = task / "parts"
    run_job(TRAIN, run, [*settings(task, max_steps=3), slow_reward(task, 0.0)])
    assert steps_of(run) == [1, 2, 3]
    three = weights(run)
    with Job(TRAIN, run, [*settings(task), slow_reward(task, 0.0), "run.seed=2"]) as job:  # another experiment
        assert "step_000003 was made with other settings: run.seed: 1 -> 2. " in job.finish(2)
    assert steps_of(run) == [1, 2, 3]
    output = run_job(TRAIN, run, [*settings(task), slow_reward(task, 0.0)])
    assert "resumed after step 3" in output and "settings changed since step_000003: loop.max_steps: 3 -> 6" in output
    same_runs(run, uninterrupted, 6)
    assert weights(run) != three


def test_a_signal_saves_and_kill_9_loses_only_the_unsaved_steps(task: Path, uninterrupted: Path) -> None:
    run = task / "signals"
    slow = slow_reward(task, 0.2)  # the same rewards
    with Job(TRAIN, run, [*settings(task), slow]) as job:
        job.reached(2)
        job.process.send_signal(signal.SIGTERM)
        output = job.finish(75)  # stopped before the last step: go on
    last = steps_of(run)[-1]
    assert 2 <= last < 6
    assert f"stopped by a signal after step {last}; saving" in output
    assert checkpoint_steps(run / "checkpoints" / "policy") == [last]
    assert not (run / "export" / "model.safetensors").exists()  # it was not at its end
    assert not (run / "done.json").exists()

    with Job(TRAIN, run, [*settings(task), slow]) as job:
        killed(job, last + 1)
    assert checkpoint_steps(run / "checkpoints" / "policy") == [last]

    output = run_job(TRAIN, run, [*settings(task), slow])
    assert f"resumed after step {last}" in output
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    same_runs(run, uninterrupted, 6)


def test_checkpoints_by_time_of_a_run_by_epochs(task: Path, uninterrupted: Path) -> None:
    """One after every step here, written in the background; 2.25 epochs of 64 prompts, 24 a step, are the six steps.

    Two are kept; the kill may come after a third is complete and before the oldest is deleted.
    """
    run, length = task / "by_time", ["loop.max_steps=0", "loop.epochs=2.25"]
    given = [*settings(task), *length, "loop.save_minutes=1e-9", "checkpoint.asynchronous=true"]
    with Job(TRAIN, run, [*given, slow_reward(task, 0.2)]) as job:
        killed(job, 4)
    kept = checkpoint_steps(run / "checkpoints" / "policy")
    assert 1 <= len(kept) <= 3
    output = run_job(TRAIN, run, [*given, slow_reward(task, 0.2)])
    assert f"resumed after step {kept[-1]}" in output and "lost" not in output
    said = "the run ends after 6 steps (loop.epochs=2.25) of 24 samples: 144 samples, 2.25 epochs of 64, responses of at most 8 tokens"
    assert said in output
    assert checkpoint_steps(run / "checkpoints" / "policy") == [5, 6]
    same_runs(run, uninterrupted, 6)


def test_a_run_that_was_killed_before_its_first_checkpoint_says_so_at_its_start_and_end(task: Path, uninterrupted: Path) -> None:
    run = task / "too_early"
    with Job(TRAIN, run, [*settings(task), slow_reward(task, 0.2)]) as job:
        killed(job, 2)
        assert "first after 30 minutes, then every 30 minutes, and at the end" in job.output()
    output = run_job(TRAIN, run, [*settings(task), slow_reward(task, 0.0)])
    lines = [line for line in output.splitlines() if "steps of an earlier start are lost" in line]
    assert len(lines) == 2 and output.splitlines()[-1] == lines[-1]
    assert without_times(run) == without_times(uninterrupted)
