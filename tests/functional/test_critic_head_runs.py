"""PPO whose critic is a head on the policy (`critic.kind=head`): it learns in one component, two ranks give the numbers of one, a kill
changes no bit, and a run with a critic of another kind starts from the head that is exported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resumed_runs import kill_after, same_runs
from safetensors.torch import load_file
from test_critic_in_actor import assert_close
from tiers import cases
from training_jobs import SAYS_77, Job, launcher, ppo_settings, run_aligner, run_job, series, slow_reward, steps_of, train, without_times

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
HEAD = "value_head.safetensors"
LAYOUTS = {
    "tp2": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.pp=2",),
    "dp2": (),
    "cp2_packed": ("parallel.cp=2", "model.packing=true", "model.micro_batch_tokens=64"),
}


def settings(folder: Path, gradient: str = "joint", reward_seconds: float = 0.0) -> list[str]:
    """Two epochs over 24 rollouts a step, with text beside (PPO-ptx), an average of the weights, and a learning rate of the head's own."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "abcde"[: number % 5 + 1] * 2}) + "\n" for number in range(7)))
    return [
        *("algorithm.pretraining_coef=0.3", f"pretraining.train={text}", "pretraining.batch_size=3"),
        *ppo_settings(folder),
        *("critic.kind=head", f"critic.head.gradient={gradient}", "critic.head.coef=0.5", "critic.optimizer.lr=3e-3"),
        *("reward.serve=false", slow_reward(folder, reward_seconds), "model.make_vocab_divisible_by=5"),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2", "critic.mini_batch_size=12"),
        *("optimizer.lr=1e-3", "optimizer.ema_decay=0.5", f"loop.max_steps={NUM_STEPS}", "loop.save_every=2"),
    ]


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    run_job(train("ppo"), task / "whole", settings(task))
    return task / "whole"


def test_it_learns_the_fixed_string(task: Path) -> None:
    run = task / "learns"
    own = [*ppo_settings(task), *SAYS_77, "critic.kind=head", "reward.serve=false", "loop.max_steps=40", "run.export_hf=false"]
    run_job(train("ppo"), run, own)
    rewards = series(run, "rollout/reward")
    losses = [line["critic/loss"] for line in without_times(run)[1:]]  # each is of the step before
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-5:]) / 5 > 0.9
    assert losses[-1] < 0.5 * losses[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["policy"] and not (run / "logs" / "critic.0.log").exists()


@pytest.mark.parametrize("layout", cases(LAYOUTS, fast=("tp2",)))
def test_two_ranks_equal_one(layout: str, whole: Path, task: Path) -> None:
    run_job(launcher("ppo"), task / layout, [*settings(task), *LAYOUTS[layout], "num_processes=2"])
    assert_close(task / layout, whole)
    ours, theirs = (load_file(run / "export" / HEAD) for run in (task / layout, whole))
    assert max((ours[name] - one).abs().max() for name, one in theirs.items()) < 1e-4


def test_killed_and_resumed(whole: Path, task: Path) -> None:
    """Checkpoints are written in the background, and the run is killed after step 3."""
    own = ("checkpoint.asynchronous=true", "loop.save_every=1", "optimizer.offload=true")
    killed = task / "killed"
    with Job(train("ppo"), killed, [*settings(task, reward_seconds=0.3), *own]) as job:
        kill_after(job, 3)
    output = run_job(train("ppo"), killed, [*settings(task), *own])
    assert "resumed after step" in output and steps_of(killed) == steps_of(whole)
    same_runs(killed, whole, NUM_STEPS, components=("policy",))
    ours, theirs = (load_file(run / "export" / HEAD) for run in (killed, whole))
    assert ours.keys() == theirs.keys() and all((ours[name] == one).all() for name, one in theirs.items())


def test_a_model_as_critic_starts_from_the_export(whole: Path, task: Path) -> None:
    """Policy and critic are both the export, whose head the critic has; a head of the run's own would not be continued without it."""
    own = [one for one in settings(task) if not one.startswith("critic.head")]
    last = ("loop.max_steps=1", "critic.kind=model", f"model.path={whole / 'export'}", "critic.clip=0", "algorithm.gae_lambda=1")
    start = [one for one in own if not one.startswith("model.architecture")]
    run_job(train("ppo"), task / "model", [*start, *last])
    assert not (task / "model" / "export" / HEAD).exists()
    code, output = run_aligner("train", "ppo", *own, "critic.kind=model", "run.allow_changes=true", f"run.directory={whole}")
    assert code != 0 and "critic has none that fits: the two are saved together" in output, output
