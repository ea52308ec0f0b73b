"""PPO whose critic is in the actor's processes, as a model (`critic.kind=model`) or as a head on the policy (`head`): the model has the
numbers of a critic behind a server, the head learns; two ranks give the numbers of one, and a kill changes no bit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from resumed_runs import kill_after, same_runs
from safetensors.torch import load_file
from tiers import cases
from training_jobs import (
    SAYS_77,
    Job,
    checkpoint_steps,
    launcher,
    ppo_settings,
    run_aligner,
    run_job,
    series,
    slow_reward,
    steps_of,
    train,
    without_times,
)

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
LAUNCH = launcher("ppo")
HEAD = "value_head.safetensors"
TP2 = ("parallel.tp=2", "parallel.sequence_parallel=true")
LAYOUTS = {
    "model_dp2": (),
    "model_tp2": TP2,
    "head_tp2": TP2,
    "head_pp2": ("parallel.pp=2",),
    "head_dp2": (),
    "head_cp2_packed": ("parallel.cp=2", "model.packing=true", "model.micro_batch_tokens=64"),
}
MODEL = ("critic.mini_batch_size=10", "critic.num_epochs=2", "critic.optimizer.lr=1e-3", "critic.optimizer.decay=cosine")
ON_POLICY = ("critic.head.gradient=joint", "critic.head.coef=0.5", "critic.optimizer.lr=3e-3", "optimizer.ema_decay=0.5")
COMPONENTS = {"model": ("policy", "critic"), "head": ("policy",)}


def settings(folder: Path, kind: str, reward_seconds: float = 0.0) -> list[str]:
    """Two epochs over 24 rollouts a step; a critic's last mini-batch is smaller, a head has a learning rate of its own and the policy an
    average of its weights. Every update of the policy learns some text too (PPO-ptx).

    Learning rates are small: Adam turns a gradient's last bits near 0 into whole steps. The vocabulary is padded the same for any tp.
    """
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "abcde"[: number % 5 + 1] * 2}) + "\n" for number in range(7)))
    return [
        *("algorithm.pretraining_coef=0.3", f"pretraining.train={text}", "pretraining.batch_size=3"),
        *ppo_settings(folder),
        *(f"critic.kind={kind}", "reward.serve=false", slow_reward(folder, reward_seconds), "model.make_vocab_divisible_by=5"),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2", "critic.mini_batch_size=12"),
        *(ON_POLICY if kind == "head" else MODEL),
        *("optimizer.lr=1e-3", f"loop.max_steps={NUM_STEPS}", "loop.save_every=2", "loop.validate_every=1"),
        *(f"data.validation={folder / 'prompts.jsonl'}", "data.num_validation_prompts=8"),
        *("checkpoint.best_metric=validation/reward", "checkpoint.best_mode=max"),
    ]


@pytest.fixture(scope="module")
def whole(task: Path) -> Callable[[str], Path]:
    """`whole(kind)`: the directory of a run of one rank that nothing disturbs; made once."""

    @functools.cache
    def make(kind: str) -> Path:
        run_job(LAUNCH, task / kind, settings(task, kind))
        return task / kind

    return make


def assert_close(run: Path, whole: Path) -> None:
    """The metrics of every step, the critic's among them, and the weights, within rounding."""
    for got, expected in zip(without_times(run), without_times(whole), strict=True):
        near_zero = {key for key in expected if key.startswith(("rollout/logprob_", "policy/approx_kl", "policy/loss"))}
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, rel=0 if key in near_zero else 2e-3, abs=2e-5, nan_ok=True), key
    for file in ("model.safetensors", HEAD) if (whole / "export" / HEAD).exists() else ("model.safetensors",):
        ours, theirs = (load_file(folder / "export" / file) for folder in (run, whole))
        assert max((ours[name] - weight).abs().max() for name, weight in theirs.items()) < 1e-4


def test_a_model_equals_a_critic_behind_a_server(whole: Callable[[str], Path], task: Path) -> None:
    """Values, returns and losses of the critic are in its metrics, and the policy has learnt from its advantages. Its checkpoints are those
    of the policy's steps; no component is started for it."""
    own, served = whole("model"), task / "served"
    run_job(LAUNCH, served, settings(task, "server"))
    assert (served / "logs" / "critic.0.log").exists() and not (own / "logs" / "critic.0.log").exists()
    assert_close(served, own)
    assert all(line["policy/pretraining_loss"] > 0 for line in without_times(own))
    assert len({line["critic/mean"] for line in without_times(own)[1:]}) == NUM_STEPS - 1
    policy, critic = own / "checkpoints" / "policy", own / "checkpoints" / "critic"
    assert checkpoint_steps(policy) == checkpoint_steps(critic) == [2, 4]
    assert (policy / "latest").read_text() == (critic / "latest").read_text()
    assert (critic / (policy / "best").read_text().strip() / "aligner.json").exists()
    code, output = run_aligner("serve", "critic", "ppo", *settings(task, "model"), f"run.directory={task / 'none'}")
    assert code == 2 and "critic.kind=model: the actor's processes have the critic; start no component for it" in output


def test_a_head_learns_the_fixed_string(task: Path) -> None:
    run = task / "learns"
    own = [*ppo_settings(task), *SAYS_77, "critic.kind=head", "reward.serve=false", "loop.max_steps=40", "run.export_hf=false"]
    run_job(train("ppo"), run, own)
    rewards = series(run, "rollout/reward")
    losses = [line["critic/loss"] for line in without_times(run)[1:]]  # each is of the step before
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-5:]) / 5 > 0.9
    assert losses[-1] < 0.5 * losses[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["policy"]


@pytest.mark.parametrize("layout", cases(LAYOUTS, fast=("model_tp2", "head_tp2")))
def test_two_ranks_equal_one(layout: str, whole: Callable[[str], Path], task: Path) -> None:
    kind = layout.partition("_")[0]
    run_job(LAUNCH, task / layout, [*settings(task, kind), *LAYOUTS[layout], "num_processes=2"])
    assert_close(task / layout, whole(kind))


@pytest.mark.parametrize("kind", COMPONENTS)
def test_killed_and_resumed(kind: str, whole: Callable[[str], Path], task: Path) -> None:
    """A model waits in host memory between its uses, checkpoints are written in the background, and the run is killed after step 3."""
    own = ("optimizer.offload=true", "checkpoint.asynchronous=true", "loop.save_every=1")
    own += ("critic.optimizer.offload=true",) if kind == "model" else ()
    killed = task / f"{kind}_killed"
    with Job(train("ppo"), killed, [*settings(task, kind, reward_seconds=0.3), *own]) as job:
        kill_after(job, 3)
    output = run_job(train("ppo"), killed, [*settings(task, kind), *own])
    assert "resumed after step" in output and steps_of(killed) == steps_of(whole(kind))
    same_runs(killed, whole(kind), NUM_STEPS, components=COMPONENTS[kind])
    if kind == "head":
        ours, theirs = (load_file(run / "export" / HEAD) for run in (killed, whole(kind)))
        assert ours.keys() == theirs.keys() and all((ours[name] == one).all() for name, one in theirs.items())


@pytest.mark.slow
def test_beside_a_reward_model_that_shares_the_gpus(whole: Callable[[str], Path], task: Path) -> None:
    """All of the actor, its critic included, makes room for the reward server."""
    run_job(LAUNCH, task / "shared", [*settings(task, "model"), "reward.serve=true", "placement=colocated"])
    same_runs(task / "shared", whole("model"), NUM_STEPS, components=("policy", "critic"))
