"""PPO whose critic is a model in the actor's processes (`critic.kind=model`): the numbers of a critic behind a server, on two ranks those
of one, the same bits in turns on the device and after a kill.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resumed_runs import kill_after, same_runs
from safetensors.torch import load_file
from tiers import cases
from training_jobs import Job, checkpoint_steps, launcher, ppo_settings, run_aligner, run_job, slow_reward, steps_of, train, without_times

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
LAUNCH = launcher("ppo")
LAYOUTS = {"dp2": (), "tp2": ("parallel.tp=2", "parallel.sequence_parallel=true")}


def settings(folder: Path, kind: str = "model", reward_seconds: float = 0.0) -> list[str]:
    """Two epochs of both models over 24 rollouts a step, in mini-batches of which the critic's last is smaller; cosine decay.

    Learning rates are small: Adam turns a gradient's last bits near 0 into whole steps. The vocabulary is padded the same for any tp.
    Every update of the policy learns some text too (PPO-ptx).
    """
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "abcde"[: number % 5 + 1] * 2}) + "\n" for number in range(7)))
    return [
        *("algorithm.pretraining_coef=0.3", f"pretraining.train={text}", "pretraining.batch_size=3"),
        *ppo_settings(folder),
        *(f"critic.kind={kind}", "reward.serve=false", slow_reward(folder, reward_seconds), "model.make_vocab_divisible_by=5"),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2"),
        *("critic.mini_batch_size=10", "critic.num_epochs=2", "critic.optimizer.lr=1e-3", "critic.optimizer.decay=cosine"),
        *("optimizer.lr=1e-3", f"loop.max_steps={NUM_STEPS}", "loop.save_every=2", "loop.validate_every=1"),
        *(f"data.validation={folder / 'prompts.jsonl'}", "data.num_validation_prompts=8"),
        *("checkpoint.best_metric=validation/reward", "checkpoint.best_mode=max"),
    ]


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    run_job(LAUNCH, task / "whole", settings(task))
    return task / "whole"


def assert_close(run: Path, whole: Path) -> None:
    """The metrics of every step, the critic's among them, and the weights, within rounding."""
    for got, expected in zip(without_times(run), without_times(whole), strict=True):
        near_zero = {key for key in expected if key.startswith(("rollout/logprob_", "policy/approx_kl", "policy/loss"))}
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, rel=0 if key in near_zero else 2e-3, abs=2e-5, nan_ok=True), key
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (run, whole))
    assert max((ours[name] - weight).abs().max() for name, weight in theirs.items()) < 1e-4


def test_it_equals_a_critic_behind_a_server(whole: Path, task: Path) -> None:
    """Values, returns and losses of the critic are in its metrics, and the policy has learnt from its advantages."""
    run_job(LAUNCH, task / "served", settings(task, "server"))
    assert (task / "served" / "logs" / "critic.0.log").exists() and not (whole / "logs" / "critic.0.log").exists()
    assert_close(task / "served", whole)
    assert all(line["policy/pretraining_loss"] > 0 for line in without_times(whole))
    learnt = [line["critic/mean"] for line in without_times(whole)[1:]]
    assert len(set(learnt)) == NUM_STEPS - 1


@pytest.mark.parametrize("layout", cases(LAYOUTS, fast=("tp2",)))
def test_two_ranks_equal_one(layout: str, whole: Path, task: Path) -> None:
    run_job(LAUNCH, task / layout, [*settings(task), *LAYOUTS[layout], "num_processes=2"])
    assert_close(task / layout, whole)


def test_killed_and_resumed_in_turns(whole: Path, task: Path) -> None:
    """The critic waits in host memory between its uses, checkpoints are written in the background, and the run is killed after step 3."""
    turns = ("critic.optimizer.offload=true", "optimizer.offload=true", "checkpoint.asynchronous=true", "loop.save_every=1")
    killed = task / "killed"
    with Job(train("ppo"), killed, [*settings(task, reward_seconds=0.3), *turns]) as job:
        kill_after(job, 3)
    output = run_job(train("ppo"), killed, [*settings(task), *turns])
    assert "resumed after step" in output and steps_of(killed) == steps_of(whole)
    same_runs(killed, whole, NUM_STEPS, components=("policy", "critic"))


def test_its_checkpoints_are_those_of_the_policys_steps(whole: Path) -> None:
    policy, critic = whole / "checkpoints" / "policy", whole / "checkpoints" / "critic"
    assert checkpoint_steps(policy) == checkpoint_steps(critic) == [2, 4]
    assert (policy / "latest").read_text() == (critic / "latest").read_text()
    assert (critic / (policy / "best").read_text().strip() / "aligner.json").exists()


@pytest.mark.slow
def test_beside_a_reward_model_that_shares_the_gpus(whole: Path, task: Path) -> None:
    """All of the actor, its critic included, makes room for the reward server."""
    run_job(LAUNCH, task / "shared", [*settings(task), "reward.serve=true", "placement=colocated"])
    same_runs(task / "shared", whole, NUM_STEPS, components=("policy", "critic"))


def test_no_component_is_started_for_it(task: Path) -> None:
    code, output = run_aligner("serve", "critic", "ppo", *settings(task), f"run.directory={task / 'none'}")
    assert code == 2 and "critic.kind=model: the actor's processes have the critic; start no component for it" in output
