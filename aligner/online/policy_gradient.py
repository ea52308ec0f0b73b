"""Shared parts of policy gradients, whatever the baseline of a response (a critic: `ppo.py`; other responses: `grpo.py`): settings of the
loss and of the KL, shaped rewards, masks, mini-batches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aligner.errors import UP_TO_1, ConfigError, check_numbers, check_range
from aligner.losses.advantages import DIVIDES, GROUPED, PER_RESPONSE, TURNED, Estimator, Turns
from aligner.losses.aggregation import Aggregation, masked
from aligner.losses.correction import CorrectionConfig
from aligner.losses.kl import KLEstimator
from aligner.losses.policy import Objective, policy_loss
from aligner.losses.shaping import Moments, ShapingConfig, Standardize, shape
from aligner.models.training.guard import Guard, GuardConfig, NonFinite
from aligner.online.collect import ScoredRollouts
from aligner.protocols import Loss
from aligner.run.recipe import named, resolve, text_of
from aligner.types import EpisodeRows, PolicyBatch, Rollout, RolloutBatch, TurnMark
from aligner.types.rows import num_rows, take_rows


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig:
    """Settings under `algorithm.` that every policy gradient has by inheritance, `aligner.losses.policy.policy_loss`'s among them."""

    objective: str = Objective.ppo.value  # ppo, gspo, gspo_token, cispo, gmpo, sapo, reinforce, or my_file.py:function (docs/extending.md)
    clip_eps_low: float = 0.2  # ratios are clipped from below at 1 - this (gmpo: log-ratios at minus this)
    clip_eps_high: float = 0.2  # ratios are clipped from above at 1 + this (gmpo: log-ratios at this)
    dual_clip: float = 0.0  # 0: off; of objective=ppo
    tau_pos: float = 1.0  # of objective=sapo: steepness where the advantage is positive
    tau_neg: float = 1.05  # of objective=sapo: steepness where the advantage is negative
    entropy_coef: float = 0.0  # weight of the policy's entropy, as a bonus in the loss; 0: none
    aggregation: Aggregation = Aggregation.token_mean  # what the mean of the loss is over: all tokens, or sequences (docs/critic_free.md)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)  # for a sampler whose log-probs are not the trainer's
    mini_batch_size: int = 128  # responses per policy update
    num_epochs: int = 1  # passes over a step's rollouts
    kl_coef: float = 0.0  # of the KL to the reference
    kl_estimator: KLEstimator = KLEstimator.k1  # per-token estimator of the KL to the reference (Schulman 2020)
    kl_target: float = 0.0  # 0: fixed coefficient; else adaptive (Ziegler et al. 2019) towards this KL per response token
    kl_horizon: int = 10000  # rollouts over which the adaptive coefficient moves
    gamma: float = 1.0  # discount per token
    mask_truncated: bool = False  # leave responses that were cut at the length limit out of the losses
    shaping: ShapingConfig = field(default_factory=ShapingConfig)  # of scores, before a KL is taken off

    def __post_init__(self) -> None:
        if not (0 < self.clip_eps_low < 1 and self.clip_eps_high > 0):
            raise ConfigError(
                f"algorithm.clip_eps_low={self.clip_eps_low}, clip_eps_high={self.clip_eps_high}: need 0 < low < 1 and high > 0"
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip}: must be above 1, or 0 for off")
        self.objective = text_of(self.objective)
        objective = named("algorithm.objective", self.objective, Objective)
        if self.dual_clip and objective is not Objective.ppo:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip}: objective={self.objective} has none; allowed: 0")
        check_numbers(self, "algorithm", above_0=("tau_pos", "tau_neg"), not_negative=("entropy_coef",))
        per_sequence = (Objective.gspo, Objective.gmpo)
        if objective in per_sequence and self.aggregation is not Aggregation.sequence_mean:
            raise ConfigError(
                f"algorithm.aggregation={self.aggregation.value}: objective={self.objective} has one loss per response; "
                f"allowed: {Aggregation.sequence_mean.value}"
            )

        check_numbers(self, "algorithm", at_least_1=("mini_batch_size", "num_epochs", "kl_horizon"), not_negative=("kl_coef", "kl_target"))
        if self.kl_target and not self.kl_coef:
            raise ConfigError(f"algorithm.kl_target={self.kl_target}: moves kl_coef=0, which stays 0; allowed: 0, or kl_coef above 0")
        check_range(self, "algorithm", UP_TO_1, "gamma")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one training step."""
        return self.rollouts_per_step // self.mini_batch_size * self.num_epochs

    def loss(self, *, max_response_length: int, **terms: Any) -> Loss:
        """`policy_loss` with these settings; `terms` are the algorithm's own (its KL)."""
        return partial(
            policy_loss,
            objective=resolve("algorithm.objective", self.objective, Objective, ("log_ratios", "advantages", "mask", "clip")),
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            dual_clip=self.dual_clip or None,
            tau_pos=self.tau_pos,
            tau_neg=self.tau_neg,
            entropy_coef=self.entropy_coef,
            aggregation=self.aggregation,
            aggregation_constant=float(max_response_length),
            correction=self.correction,
            **terms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Rollouts with the rewards (and baselines) used for training."""

    collected: ScoredRollouts
    moments: Moments  # of all scores so far: to be kept once the step is over
    metrics: Mapping[str, float]


def shaped(collected: ScoredRollouts, batch: RolloutBatch, config: ShapingConfig, moments: Moments, *, max_length: int) -> Shaped:
    """The scores of a step's rollouts as rewards (`aligner.losses.shaping`); a response's length counts the policy's own tokens."""
    rows = collected.episodes
    lengths, valid = rows.total(batch.loss_mask.sum(dim=1)), rows.per_episode(collected.valid)
    rewards, seen, metrics = shape(rows.per_episode(collected.rewards), lengths, valid, config, moments, max_length=max_length)
    baselines = collected.baselines
    if baselines is not None:  # where there are any, the settings treat every score alike: see `estimators.check_estimator`
        own = rows.per_episode(baselines)
        baselines = rows.per_row(shape(own, torch.zeros_like(lengths), valid, config, Moments(), max_length=max_length)[0])
    return Shaped(collected=replace(collected, rewards=rows.per_row(rewards), baselines=baselines), moments=seen, metrics=metrics)


def finite_rows(x: Tensor, guard: GuardConfig, what: str) -> Tensor:
    """Which rows of x [B, S] are finite everywhere, bool [B]. Every rank calls it with the same tensor.

    If some are not, and the guard does not skip such updates, it raises RunHalted or RollBack as for an update.
    """
    finite = x.isfinite().all(dim=1)
    if not finite.all() and guard.non_finite is not NonFinite.skip:
        Guard(guard).refuse(f"{what} of {int((~finite).sum())} of {len(finite)} rollouts are not finite")
    return finite


def mini_batches(batch: PolicyBatch, size: int, num_epochs: int, *, key: str, episodes: EpisodeRows | None = None) -> list[PolicyBatch]:
    """The updates of one step: in each epoch all episodes (shuffled by `key` from the second epoch on) cut into equal parts, each with all
    rows of its episodes. Without `episodes` every row is one.

    A part without any token to learn from (all of its responses were masked) is left out: it would only move the optimizer's momentum.
    """
    episodes = episodes or EpisodeRows.single(num_rows(batch))
    parts: list[PolicyBatch] = []
    for epoch in range(num_epochs):
        order = list(range(len(episodes)))
        if epoch:
            random.Random(f"{key}/{epoch}").shuffle(order)
        for cut in [order[start : start + size] for start in range(0, len(order), size)]:
            as_it_is = episodes.are_single and not epoch
            rows = episodes.rows_of(torch.tensor(cut))
            parts.append(take_rows(batch, slice(cut[0], cut[-1] + 1) if as_it_is else rows))
    return [part for part in parts if part.loss_mask.any()]


def as_episodes(batch: PolicyBatch, rows: EpisodeRows) -> PolicyBatch:
    """The batch, with what its loss has to know of episodes that are several rows, as its loss_mask now is."""
    if rows.are_single:
        return batch
    tokens = batch.loss_mask.sum(dim=1)
    before = tokens.cumsum(0) - tokens
    first = rows.per_row(rows.per_episode(before))  # tokens before the episode's first row
    return replace(batch, episode_tokens=rows.per_row(rows.total(tokens)), leads=(tokens > 0) & (before == first))


def turns_of(rollouts: Sequence[Rollout], rows: EpisodeRows, mask: Tensor) -> Turns:
    """The policy's turns of each episode; a row without marks is one turn, in answer to its prompt. `mask` bool [B, S] of the rows."""
    owners = rows.owner.tolist()
    whole = [(TurnMark(start=0, end=len(one.response), number=0, state=hash(one.prompt.tokens)),) for one in rollouts]
    marks = [one.turns or own for one, own in zip(rollouts, whole, strict=True)]
    most = max(mark.number for own in marks for mark in own) + 1
    number = torch.zeros(mask.shape, dtype=torch.int64)
    rewards, states = torch.zeros(len(rows), most), torch.zeros(len(rows), most, dtype=torch.int64)
    for row, (owner, own) in enumerate(zip(owners, marks, strict=True)):
        start = len(rollouts[row].prompt.tokens)
        for mark in own:
            number[row, start + mark.start : start + mark.end] = mark.number
            rewards[owner, mark.number], states[owner, mark.number] = mark.reward, mark.state
    return Turns(number=rows.joined(number), rewards=rewards, states=states)


def sampled_next(rollouts: Sequence[Rollout], rows: EpisodeRows, width: int) -> Tensor:
    """`following` of `gae_over_rows`, int64 [B], for rows of `width` columns: after a row's last turn comes the one sampled next in its
    session, in whichever row it is the policy's own. Rows without marks are one turn each, in their order."""
    starts: dict[tuple[int, int], int] = {}
    ends = []
    for row, (owner, one) in enumerate(zip(rows.owner.tolist(), rollouts, strict=True)):
        own = {mark.number: mark.start for mark in one.turns} or {row: 0}
        starts |= {(owner, number): row * width + len(one.prompt.tokens) + start for number, start in own.items()}
        ends.append((owner, max(own)))
    return torch.tensor([starts.get((owner, number + 1), -1) for owner, number in ends])


def masked_mean(x: Tensor, mask: Tensor) -> float:
    """Mean of x [B, S] over the mask; 0 if that is empty."""
    return masked(x.double(), mask).sum().item() / max(int(mask.sum()), 1)


def check_estimator(estimator: Estimator | None, config: Any) -> None:
    """Raise ConfigError naming the setting that does not go with the estimator (None: one of the user's own), and what does."""
    group_size, gamma = config.group_size, config.gamma
    name = "of your own" if estimator is None else estimator.value
    if estimator in GROUPED and group_size < 2:
        raise ConfigError(
            f"algorithm.group_size={group_size}: a group needs at least 2 responses to compare, with advantage_estimator={name}; "
            f"1 is allowed with {_names(set(Estimator) - GROUPED)}"
        )
    if config.dynamic_sampling and estimator is not None and estimator not in GROUPED:
        raise ConfigError(
            f"algorithm.dynamic_sampling=true: advantage_estimator={name} learns from equal rewards; allowed with {_names(GROUPED)}"
        )
    if not config.normalize_std and estimator not in DIVIDES:
        raise ConfigError(
            f"algorithm.normalize_std=false: advantage_estimator={name} does not divide by a group's deviation; allowed: true"
        )
    if gamma != 1 and estimator in PER_RESPONSE:
        raise ConfigError(f"algorithm.gamma={gamma}: advantage_estimator={name} has one advantage per response; allowed: 1")
    if config.step_weight != 1 and estimator is not Estimator.gigpo:
        raise ConfigError(f"algorithm.step_weight={config.step_weight}: advantage_estimator={name} has none; allowed: 1")
    if estimator is Estimator.remax:
        _check_baselines(config.shaping)
    if estimator in TURNED and config.shaping != ShapingConfig(overlong_buffer=config.shaping.overlong_buffer):
        raise ConfigError(
            f"algorithm.shaping: advantage_estimator={name} takes the rewards of single turns as they are, and the whole's would be in "
            "another unit; allowed: the defaults, and overlong_buffer"
        )


def _check_baselines(shaping: ShapingConfig) -> None:
    """A greedy response's reward is clipped and scaled as the others are; the rest would hold the two against each other in two units."""
    if shaping.standardize is not Standardize.none:
        raise ConfigError(
            f"algorithm.shaping.standardize={shaping.standardize.value}: advantage_estimator=remax compares with greedy responses, "
            f"which are not among those that are standardised; allowed: none"
        )
    if shaping.overlong_buffer:
        raise ConfigError(
            f"algorithm.shaping.overlong_buffer={shaping.overlong_buffer}: advantage_estimator=remax keeps only the reward of the "
            f"greedy response that it compares with; allowed: 0"
        )


def _names(estimators: set[Estimator] | frozenset[Estimator]) -> str:
    return ", ".join(estimator.value for estimator in Estimator if estimator in estimators)
