"""PPO with a critic server, killed with SIGKILL and resumed, or with its critic alone killed and started again in the middle, equals one
that was left alone: policy, critic and metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from resumed_runs import kill_after, optimizer_and_weights, same_tensors, weights
from training_jobs import (
    Job,
    checkpoint_steps,
    eventually,
    kill,
    launcher,
    ppo_settings,
    run_job,
    series,
    slow_reward,
    steps_of,
    without_times,
    write_task,
)

pytestmark = pytest.mark.timeout(600)
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was left alone."""
    folder = tmp_path_factory.mktemp("resume_ppo")
    write_task(folder)
    run_job(LAUNCH, folder / "whole", settings(folder, 0.0))
    return folder / "whole"


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
    """Of one whose critic was killed twice: before there was any checkpoint, and after step 3 with the checkpoint of step 2.

    It answered without Triton; the others take it where it is installed.
    """
    directory = whole.parent / "wounded"
    restarts = ("local_launcher.max_server_restarts=2", "critic.server.transport=http")
    with Job(LAUNCH, directory, [*settings(whole.parent, 0.3), *restarts]) as job:
        for step in (1, 3):
            job.reached(step)
            registration = directory / "services" / "critic.json"
            assert eventually(lambda path=registration: path.exists() and json.loads(path.read_text())["state"] == "ready", 60)
            kill(json.loads(registration.read_text())["pid"])
        output = job.finish()
        assert job.processes() == {}
    assert output.count("starting it again") == 2
    assert output.count("rank(s), transport http\n") == 3
    assert output.count("is sent again what it lacks: step") == 2
    assert "critic: resumed after step 2" in output and "resumed after step 2\n" not in (directory / "logs" / "actor.0.log").read_text()
    return directory


@pytest.fixture(params=["resumed", "wounded"])
def other(request: pytest.FixtureRequest) -> Path:
    """A run that ought to equal the one that was left alone."""
    return request.getfixturevalue(request.param)


def test_the_policies_are_equal_to_the_last_bit(whole: Path, other: Path) -> None:
    assert weights(other) == weights(whole)


@pytest.mark.parametrize("component", ["policy", "critic"])
def test_the_last_checkpoints_hold_the_same_weights_and_moments(whole: Path, other: Path, component: str) -> None:
    one, another = (optimizer_and_weights(run / "checkpoints" / component / f"step_{NUM_STEPS:06d}") for run in (whole, other))
    same_tensors(another, one)


def test_the_critic_was_trained_once_on_each_step(whole: Path, other: Path) -> None:
    for run in (whole, other):
        state = json.loads((run / "checkpoints" / "critic" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
        ledger = state["loop"]["ledger"]
        assert ledger["count"] == NUM_STEPS
        assert [record["identity"]["step"] for record in ledger["records"]] == list(range(1, NUM_STEPS + 1))
        policy = json.loads((run / "checkpoints" / "policy" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
        assert policy["loop"]["critic_mark"] == ledger["mark"]
        # What the newest two pairs of checkpoints do not need is no longer in the journal.
        assert sorted(path.name[:8] for path in (run / "journal" / "critic").iterdir()) == ["00000005"]


def test_the_metrics_are_equal(whole: Path, other: Path) -> None:
    """Also the adaptive coefficient's path, and what the critic says of the step before a checkpoint."""
    assert steps_of(other) == list(range(1, NUM_STEPS + 1))
    assert without_times(other) == without_times(whole)
    assert len(set(series(whole, "policy/kl_coef"))) == NUM_STEPS
    losses = [line["critic/loss"] for line in without_times(whole)[1:]]  # of the step before, saved in between or not
    assert len(set(losses)) == NUM_STEPS - 1
