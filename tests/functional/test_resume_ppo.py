"""PPO with a critic server, killed with SIGKILL and resumed, or with its critic alone killed and started again until it may not be, equals
one that was left alone: policy, critic and metrics.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from resumed_runs import kill_after, ready_server, same_runs
from training_jobs import (
    Job,
    checkpoint_steps,
    kill,
    launcher,
    ppo_settings,
    run_job,
    series,
    slow_reward,
    steps_of,
    without_times,
)

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 7
LAUNCH = launcher("ppo")


def settings(folder: Path, reward_seconds: float) -> list[str]:
    """Adaptive KL that moves at every step, cosine decay of both models, two epochs of updates, 24 of 64 prompts a step."""
    return [
        *ppo_settings(folder),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2", "critic.mini_batch_size=12"),
        *("algorithm.kl_coef=0.01", "algorithm.kl_target=0.02", "algorithm.kl_horizon=100"),
        *("optimizer.decay=cosine", "critic.optimizer.decay=cosine"),
        *(f"loop.max_steps={NUM_STEPS}", "loop.save_every=2"),
        slow_reward(folder, reward_seconds),
    ]


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    run_job(LAUNCH, task / "whole", settings(task, 0.0))
    return task / "whole"


@pytest.fixture(scope="module")
def resumed(whole: Path) -> Path:
    """Of one that was killed after step 3, whose last checkpoint is of step 2."""
    folder = whole.parent
    killed = folder / "killed"
    with Job(LAUNCH, killed, settings(folder, 0.3)) as job:
        kill_after(job, 3)
    assert checkpoint_steps(killed / "checkpoints" / "policy") == checkpoint_steps(killed / "checkpoints" / "critic") == [2]
    output = run_job(LAUNCH, killed, settings(folder, 0.0))
    assert "resumed after step 2" in output and "critic: resumed after step 2" in output
    return killed


@pytest.fixture(scope="module")
def wounded(whole: Path) -> Path:
    """Of one whose critic, which answered without Triton, was killed three times: before there was any checkpoint, after step 3, and once
    more than it may be started again, which ends the run with a checkpoint of the policy; the same command continued it."""
    folder = whole.parent
    directory, restarts = folder / "wounded", ["local_launcher.max_server_restarts=2", "critic.server.transport=http"]
    with Job(LAUNCH, directory, [*settings(folder, 0.3), *restarts]) as job:
        pid = 0
        for step in (1, 3, 5):
            job.reached(step)
            pid = ready_server(directory, "critic", after=pid)
            kill(pid)
        assert job.wait() == 128 + signal.SIGKILL
        output = job.output()
        assert job.processes() == {}
    assert output.count("starting it again") == 2 and output.count("is sent again what it lacks: step") >= 1
    served = [line for line in output.splitlines() if line.startswith("[critic] server: critic at ")]
    assert len(served) == 3 and all(line.endswith("rank(s), transport http") for line in served)
    assert "critic: resumed after step 2" in output or "critic: resumed after step 4" in output
    assert "FAILED: component critic, rank 0, was killed by SIGKILL" in output
    # The actor noticed by itself, within the launcher's grace period. Two witnesses, whichever was first: the process is gone, or the
    # launcher had already told that it will not start it again.
    noticed = (directory / "logs" / "actor.0.log").read_text().splitlines()[-1]
    assert noticed.startswith("error: critic") and f"(pid {pid} on" in noticed and "actor did not end" not in output
    assert f"its process {pid} no longer exists" in noticed or "nobody will start it again: critic was killed by SIGKILL" in noticed
    last, policy, critic = steps_of(directory)[-1], directory / "checkpoints" / "policy", directory / "checkpoints" / "critic"
    assert 5 <= last < NUM_STEPS and checkpoint_steps(policy) == sorted({*range(2, last + 1, 2), last})
    # Killed between step 6's values and its checkpoint, the critic has none of that step.
    pair = checkpoint_steps(critic)[-1]
    assert checkpoint_steps(critic) == list(range(2, pair + 1, 2)) and last - 2 <= pair <= last
    output = run_job(LAUNCH, directory, [*settings(folder, 0.0), *restarts])
    lacks = f"there is no critic checkpoint of step {last}: the run resumes after step {pair}, the newest that has both"
    assert f"resumed after step {pair}" in output and (lacks in output) == (last != pair)
    assert checkpoint_steps(policy) == checkpoint_steps(critic)
    assert not list(policy.glob("unpaired_*"))  # kept, under another name, until the run was there again
    return directory


@pytest.fixture(params=["wounded", pytest.param("resumed", marks=pytest.mark.slow)])
def other(request: pytest.FixtureRequest) -> Path:
    """A run that ought to equal the one that was left alone."""
    return request.getfixturevalue(request.param)


def test_they_are_equal_to_the_last_bit(whole: Path, other: Path) -> None:
    """Also the adaptive coefficient's path, and what the critic says of the step before a checkpoint."""
    assert steps_of(other) == list(range(1, NUM_STEPS + 1))
    same_runs(other, whole, NUM_STEPS, components=["policy", "critic"])
    assert len(set(series(whole, "policy/kl_coef"))) == NUM_STEPS
    losses = [line["critic/loss"] for line in without_times(whole)[1:]]  # of the step before, saved in between or not
    assert len(set(losses)) == NUM_STEPS - 1


def test_the_critic_was_trained_once_on_each_step(whole: Path, other: Path) -> None:
    for run in (whole, other):
        state = json.loads((run / "checkpoints" / "critic" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
        ledger = state["loop"]["ledger"]
        assert ledger["count"] == NUM_STEPS
        assert [record["identity"]["step"] for record in ledger["records"]] == list(range(1, NUM_STEPS + 1))
        policy = json.loads((run / "checkpoints" / "policy" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
        assert policy["loop"]["critic_mark"] == ledger["mark"]
        # What the newest two pairs of checkpoints do not need is no longer in the journal.
        assert sorted(path.name[:8] for path in (run / "journal" / "critic").iterdir()) == ["00000007"]
