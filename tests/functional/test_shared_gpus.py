"""PPO whose components take turns on the same devices, or whose critic serves the reward model too, equals one with three components on
devices of their own: policy, critic and metrics, to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from resumed_runs import ready_server, weights
from training_jobs import (
    PLAIN_SERVERS,
    Job,
    checkpoint_steps,
    grpo_settings,
    kill,
    launcher,
    ppo_settings,
    run_job,
    series,
    supervised_settings,
    without_times,
    write_rows,
)

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
LAUNCH = launcher("ppo")
BOTH = ["placement=colocated", "critic.with_reward=true"]


def reward_model(task: Path) -> Path:
    """The checkpoints of a reward model that has seen a few pairs."""
    pairs = ({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "7"} for a in range(8) for b in range(8) if a + b != 7)
    given = supervised_settings(task, write_rows(task / "pairs.jsonl", pairs), "algorithm.batch_size=16", "model.micro_batch_size=8")
    run_job(launcher("reward_model"), task / "reward_model", [*given, "loop.max_steps=3", "loop.save_every=3", "run.export_hf=false"])
    return task / "reward_model" / "checkpoints" / "reward_model"


@pytest.fixture(scope="module")
def settings(task: Path) -> list[str]:
    """Two ranks of the actor; validation and checkpoints on the way."""
    return [
        *(*ppo_settings(task), *PLAIN_SERVERS),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "critic.mini_batch_size=12", "num_processes=2"),
        *(f"reward.model.path={reward_model(task)}", f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=8"),
        *(f"loop.max_steps={NUM_STEPS}", "loop.save_every=2", "loop.validate_every=2"),
    ]


@pytest.fixture(scope="module")
def separate(settings: list[str], task: Path) -> Path:
    directory = task / "separate"
    run_job(LAUNCH, directory, settings)
    assert (directory / "logs" / "reward.0.log").exists()
    assert len(set(series(directory, "rollout/reward"))) == NUM_STEPS  # it learns from what the model says
    return directory


@pytest.mark.parametrize(
    "chosen",
    [BOTH, pytest.param(BOTH[:1], marks=pytest.mark.slow), pytest.param(BOTH[1:], marks=pytest.mark.slow)],
    ids=["both", "colocated", "with_reward"],
)
def test_equal_to_components_of_their_own(settings: list[str], separate: Path, tmp_path: Path, chosen: list[str]) -> None:
    """A critic that serves the reward model too, on the devices of the actor; in the other tier, each of the two alone."""
    run = tmp_path / "run"
    run_job(LAUNCH, run, [*settings, *chosen])
    if "placement=colocated" in chosen:
        assert (run / "turn").read_text().startswith("actor")  # which has the devices at the end
    assert (run / "logs" / "reward.0.log").exists() == ("critic.with_reward=true" not in chosen)
    same(run, separate)


@pytest.mark.slow
def test_a_reward_model_on_the_gpus_of_grpo(settings: list[str], task: Path, tmp_path: Path) -> None:
    (served,) = (setting for setting in settings if setting.startswith("reward.model.path="))
    given = [*grpo_settings(task), served, "reward.serve=true", "loop.max_steps=2", "algorithm.prompts_per_step=8"]
    for placement in ("separate", "colocated"):
        run_job(launcher("grpo"), tmp_path / placement, [*given, f"placement={placement}"])
    assert weights(tmp_path / "colocated") == weights(tmp_path / "separate")
    assert without_times(tmp_path / "colocated") == without_times(tmp_path / "separate")


@pytest.mark.slow
def test_a_colocated_critic_with_the_reward_dies(settings: list[str], separate: Path, tmp_path: Path) -> None:
    """Its turn is free then; the next one waits for it with its weights, and gets from the journal what it lacks."""
    directory = tmp_path / "run"
    given = [*settings, *BOTH, "checkpoint.asynchronous=true", "local_launcher.max_server_restarts=1"]
    with Job(LAUNCH, directory, given) as job:
        job.reached(1)
        kill(ready_server(directory, "critic"))
        output = job.finish()
    assert "starting it again" in output
    same(directory, separate)


def same(run: Path, separate: Path) -> None:
    for component in ("policy", "critic"):
        assert checkpoint_steps(run / "checkpoints" / component) == [2, 4]
