"""Schedules against formulas over whole runs with several updates a step: learning rates of policy and critic, their weight decay, and
the coefficient of the KL, in what is reported and in what is trained on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from settings_runs import Runs

from aligner.algorithms.grpo import GRPO, GRPOConfig, KLIn
from aligner.algorithms.ppo import PPO, PPOConfig
from aligner.loop.loop import Clock
from aligner.losses.kl import KLEstimator
from aligner.online.critics import ServedCritic

STEPS, WARM_UP, HIGH, LOW = 3, 3, 4e-3, 1e-3
SCORES = "def score(prompts, responses, answers):\n    return [len(set(response)) / 8 for response in responses]\n"
GROUPS = {"algorithm.prompts_per_step": 2, "algorithm.group_size": 4, "algorithm.mini_batch_size": 2, "algorithm.num_epochs": 2}
# By case: settings, updates of the policy in a step, of the critic in a step.
UPDATES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "sft": ("sft", {}, 1, 0),
    "dpo": ("dpo", {}, 1, 0),
    "kto": ("kto", {}, 1, 0),
    "reward_model": ("reward_model", {}, 1, 0),
    "grpo": ("grpo", GROUPS, 8, 0),  # 2 * 4 responses in mini-batches of 2, twice
    "ppo": (
        "ppo",
        {"algorithm.num_epochs": 2, "critic.mini_batch_size": 3, "critic.num_epochs": 2},
        4,  # 8 responses in mini-batches of 4, twice
        6,  # of 3, 3 and 2, twice
    ),
    "online_dpo": ("online_dpo", {"algorithm.mini_batch_size": 2, "algorithm.num_epochs": 2}, 4, 0),  # a pair of each of 4 prompts
    "rejection_sampling": ("rejection_sampling", {"algorithm.num_epochs": 2, "algorithm.drop_truncated": False}, 4, 0),  # 2 of each of 4
    "online_distill": ("online_distill", GROUPS, 8, 0),
    "spin": ("spin", {}, 1, 0),
    "self_rewarding": ("self_rewarding", {"algorithm.drop_truncated": False}, 1, 0),
}


@dataclass
class Noted:
    """What every update of a model had: learning rate, weight decay of each group, and the loss's coefficient of the KL."""

    rates: list[float] = field(default_factory=list)
    decays: list[set[float]] = field(default_factory=list)
    kl_coefs: list[float] = field(default_factory=list)


@pytest.fixture
def noted(monkeypatch) -> dict[int, Noted]:
    """By a model's id."""
    from aligner.models.training.trainable import TrainableModel

    seen: dict[int, Noted] = defaultdict(Noted)
    real = TrainableModel.train_step

    def noting(self: Any, batch: Any, outputs: Any, loss: Any, *added: Any) -> Any:
        found, own = real(self, batch, outputs, loss, *added), seen[id(self)]
        own.rates += {group["lr"] for group in self.optimizer.param_groups}
        own.decays.append({group["weight_decay"] for group in self.optimizer.param_groups})
        own.kl_coefs += [loss.keywords["kl_coef"]] if "kl_coef" in getattr(loss, "keywords", {}) else []
        return found

    monkeypatch.setattr(TrainableModel, "train_step", noting)
    return seen


@pytest.fixture(scope="module")
def runs(topology, tmp_path_factory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("schedules") / "data", topology)
    (made.folder / "judge.py").write_text(SCORES)
    return made


def rates(total: int, decay: str) -> list[float]:
    """Of each update: up to HIGH in WARM_UP of them, then down to LOW at the last of `total`."""
    found = []
    for update in range(1, total + 1):
        done = (update - WARM_UP) / (total - WARM_UP)
        down = {"linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done), "constant": 0.0}[decay]
        found.append(HIGH * update / WARM_UP if update <= WARM_UP else HIGH - (HIGH - LOW) * down)
    return found


def scheduled(decay: str, steps: int, section: str = "optimizer") -> dict[str, Any]:
    own = {"lr": HIGH, "min_lr": LOW, "warmup_steps": WARM_UP, "decay": decay, "weight_decay": 0.3}
    return {f"{section}.{name}": value for name, value in own.items()} | {"loop.max_steps": steps}


@pytest.mark.parametrize("case", UPDATES)
def test_the_learning_rate_is_at_its_end_with_the_last_update(case: str, runs: Runs, noted: dict[int, Noted]) -> None:
    recipe, settings, policy, critic = UPDATES[case]
    steps = STEPS if policy > 1 else 6
    decay, other = ("linear", "cosine") if len(case) % 2 else ("cosine", "linear")
    given = settings | scheduled(decay, steps) | (scheduled(other, steps, "critic.optimizer") if critic else {})
    outcome = runs.new(recipe, given)
    own = noted[id(outcome.model)]
    assert own.rates == pytest.approx(rates(policy * steps, decay))
    assert all(decays == {0.3} or decays == {0.3, 0.0} for decays in own.decays)
    if critic:
        assert noted[id(outcome.critic_model)].rates == pytest.approx(rates(critic * steps, other))
        assert all(0.3 in decays for decays in noted[id(outcome.critic_model)].decays)


def test_steps_that_train_the_critic_alone_are_no_part_of_the_policys_schedule(runs: Runs, noted: dict[int, Noted]) -> None:
    recipe, settings, policy, critic = UPDATES["ppo"]
    given = settings | scheduled("linear", STEPS) | scheduled("cosine", STEPS, "critic.optimizer") | {"algorithm.critic_warmup_steps": 1}
    outcome = runs.new(recipe, given)
    assert noted[id(outcome.model)].rates == pytest.approx(rates(policy * (STEPS - 1), "linear"))
    assert noted[id(outcome.critic_model)].rates == pytest.approx(rates(critic * STEPS, "cosine"))


@pytest.mark.parametrize("case", ["sft", "ppo"])
def test_epochs_make_the_schedule_of_as_many_steps(case: str, runs: Runs, noted: dict[int, Noted]) -> None:
    """Of the critic too, which counts the prompts by itself. The warm-up is a tenth of the updates."""
    recipe, settings, policy, critic = UPDATES[case]
    given = settings | {"optimizer.lr": HIGH, "optimizer.min_lr": LOW, "optimizer.warmup_steps": -1, "optimizer.warmup_fraction": 0.3}
    given |= {"critic.optimizer.lr": HIGH, "critic.optimizer.warmup_steps": -1} if critic else {}
    by_steps = runs.new(recipe, given | {"loop.max_steps": STEPS})
    algorithm = by_steps.algorithm
    order = algorithm.order if case == "sft" else algorithm.task.order
    by_epochs = runs.new(recipe, given | {"loop.max_steps": 0, "loop.epochs": order.epoch(STEPS)})
    first, second = noted[id(by_steps.model)], noted[id(by_epochs.model)]
    assert first.rates == second.rates and len(first.rates) == policy * STEPS
    assert first.rates[math.ceil(0.3 * policy * STEPS) - 1] == HIGH == max(first.rates)
    if critic:
        rates_of = [noted[id(outcome.critic_model)].rates for outcome in (by_steps, by_epochs)]
        assert rates_of[0] == rates_of[1] and len(rates_of[0]) == critic * STEPS


def test_a_length_of_the_users_own_counts_updates(runs: Runs, noted: dict[int, Noted]) -> None:
    """What comes behind it stays at the end; so does a run whose warm-up is longer than all of it."""
    outcome = runs.new("grpo", GROUPS | scheduled("linear", STEPS) | {"optimizer.decay_steps": 11})
    assert noted[id(outcome.model)].rates == pytest.approx(rates(11, "linear") + [LOW] * (8 * STEPS - 11))
    outcome = runs.new("sft", scheduled("linear", 2))
    assert noted[id(outcome.model)].rates == pytest.approx([HIGH / WARM_UP, 2 * HIGH / WARM_UP])


@pytest.mark.parametrize("case", ["dpo", "grpo"])
def test_a_resumed_run_is_where_it_was(case: str, runs: Runs, noted: dict[int, Noted]) -> None:
    """In the learning rate and in the KL's coefficient; its weights are those of the run that went through."""
    recipe, settings, policy, _ = UPDATES[case]
    kl = {"algorithm.kl_coef": 0.3, "algorithm.kl_target": 1e-4, "algorithm.kl_horizon": 20} if case == "grpo" else {}
    given = settings | kl | scheduled("cosine", STEPS + 1)
    whole = runs.new(recipe, given)
    stopped = runs.new(recipe, given, directory=runs.folder / case, until=2)
    resumed = runs.new(recipe, given, since=runs.folder / case / "checkpoints" / "policy")
    first, second = noted[id(stopped.model)], noted[id(resumed.model)]
    assert [*first.rates, *second.rates] == noted[id(whole.model)].rates == pytest.approx(rates(policy * (STEPS + 1), "cosine"))
    assert [*first.kl_coefs, *second.kl_coefs] == noted[id(whole.model)].kl_coefs
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights, whole.weights, strict=True))


def moved(coef: float, kl: float, target: float, horizon: int, rollouts: int) -> float:
    """Ziegler et al. 2019, 2.2: by the error, at most a fifth, in parts of the horizon."""
    return coef * (1 + max(-0.2, min(0.2, kl / target - 1)) * rollouts / horizon)


@pytest.mark.parametrize("target", [0.01, 1.0])
def test_the_coefficient_of_a_loss_follows_the_kl_that_is_reported(target: float, runs: Runs, noted: dict[int, Noted]) -> None:
    """Every update of a step has the coefficient of that step."""
    given = GROUPS | {"algorithm.kl_coef": 0.3, "algorithm.kl_target": target, "algorithm.kl_horizon": 20, "loop.max_steps": 4}
    outcome, expected = runs.new("grpo", given), [0.3]
    for metrics in outcome.metrics:
        assert metrics["policy/kl_coef"] == pytest.approx(expected[-1])
        expected.append(moved(expected[-1], metrics["policy/ref_kl"], target, 20, 8))
    assert len(set(expected)) == 5
    assert noted[id(outcome.model)].kl_coefs == pytest.approx([coef for coef in expected[:4] for _ in range(8)])
    assert outcome.algorithm.kl_coef == pytest.approx(expected[4])


@pytest.mark.parametrize("target", [0.1, 0.45, 2.0])  # too much KL, a little too much, too little
def test_ppos_rewards_have_the_coefficient_of_their_step(target: float, fakes, make_task) -> None:
    """A KL of 0.5 a token; rewards 0, 1, 2, 3 for responses of 2, 3, 4, 5 tokens. With lambda = 1 the first return is all that comes."""
    config = PPOConfig(rollouts_per_step=4, mini_batch_size=2, gae_lambda=1.0, kl_coef=0.1, kl_target=target, kl_horizon=16)
    task = make_task([])
    algorithm, coef = PPO(config, fakes.FakePolicy([]), task, ServedCritic(task, fakes.FakeCritic([]))), 0.1
    for step in range(1, 6):
        metrics = algorithm.step(step, Clock()).metrics
        batch = algorithm.critic.asked.trained[-1][1]
        first = [returns[mask][0].item() for returns, mask in zip(batch.returns, batch.loss_mask, strict=True)]
        assert first == pytest.approx([number - coef * 0.5 * (number + 2) for number in range(4)])
        assert metrics["policy/kl_coef"] == pytest.approx(coef)
        coef = moved(coef, 0.5, target, 16, 4)


@pytest.mark.parametrize("target", [0.1, 2.0])
def test_grpos_rewards_have_the_coefficient_of_their_step(target: float, fakes, make_task) -> None:
    """REINFORCE has no baseline: a response's advantage is its prompt's id, less the KL of its 2, 3, 4 or 5 tokens."""
    settings = {"prompts_per_step": 4, "group_size": 1, "mini_batch_size": 4, "kl_coef": 0.1, "kl_target": target, "kl_horizon": 16}
    config = GRPOConfig(**settings, kl_in=KLIn.reward, kl_estimator=KLEstimator.k1, advantage_estimator="reinforce")
    algorithm, coef = GRPO(config, fakes.FakePolicy([]), make_task([])), 0.1
    for step in range(1, 5):
        metrics = algorithm.step(step, Clock()).metrics
        batch = algorithm.policy.trained[-1]
        first = [advantages[mask][0].item() for advantages, mask in zip(batch.advantages, batch.loss_mask, strict=True)]
        assert first == pytest.approx([number - coef * 0.5 * (number + 2) for number in range(4)])
        assert metrics["policy/kl_coef"] == pytest.approx(coef)
        coef = moved(coef, 0.5, target, 16, 4)
