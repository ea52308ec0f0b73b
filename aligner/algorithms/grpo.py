"""Policy gradients without a critic: group relative policy optimisation (Shao et al. 2024, 2402.03300) and its variants.

One step: sample `group_size` responses to each prompt. `advantage_estimator` chooses what their rewards are compared with (the group's
mean, the other responses, a greedy one, nothing: `aligner.losses.advantages`), `objective` what the policy minimises. The KL to the
reference is a term of the loss, or is subtracted from the rewards of single tokens (`kl_in`). The presets under conf/grpo/algorithm are
the papers' choices.

If a step's rollouts are used for exactly one update, the trained policy is the one that sampled: the ratio is 1 with gradient,
and no separate pass for the old log-probs is made (unless the KL in the reward needs them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from aligner.data.collate import rollout_batch
from aligner.errors import FINITE, ConfigError, RunHalted, check_numbers, check_range
from aligner.loop.learnt import accounted, of_rows
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.advantages import (
    STD_EPSILON,
    TURNED,
    Estimator,
    UserEstimator,
    counted_rows,
    estimate,
    outcome_rewards,
    shaped_rewards,
)
from aligner.losses.aggregation import Aggregation, require
from aligner.losses.kl import KLEstimator, adapt_kl_coef, kl_estimate
from aligner.losses.shaping import Moments
from aligner.online.collect import ScoredRollouts, joined, response_metrics, sample_rows
from aligner.online.config import OnlineRun
from aligner.online.policy_gradient import (
    PolicyGradientConfig,
    as_episodes,
    check_estimator,
    finite_rows,
    masked_mean,
    mini_batches,
    shaped,
    turns_of,
)
from aligner.online.rollout_source import OnlineAlgorithm, RolloutSource
from aligner.online.selection import with_spread
from aligner.online.task import REWARDED, OnlineTask
from aligner.planner.workload import Phase
from aligner.protocols import Loss, Policy
from aligner.reporting.formats import Column
from aligner.reporting.summary import TOKENS_SEEN, totals
from aligner.run.recipe import Recipe, named, resolve, text_of
from aligner.run.settings import Traits
from aligner.telemetry.metrics import merge, values
from aligner.types import PolicyBatch, RolloutBatch
from aligner.types.batches import of_kind
from aligner.types.rows import num_rows

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob


class Exhausted(str, Enum):
    """How a step continues if its rounds together had too few groups with a signal."""

    stop = "stop"  # ends the run
    fill = "fill"  # continues, padded with groups without a signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The rollouts of one step. Episodes are in groups of neighbours, one group per prompt and round."""

    sampled: ScoredRollouts  # all of them: what is reported
    chosen: ScoredRollouts  # what is learnt from
    num_rounds: int
    num_surplus: int  # groups with a signal that were dropped
    without_signal: float | None  # the part of the sampled groups; None where a group is one response

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups."""
        metrics = {"rollout/rounds": float(self.num_rounds), "rollout/groups_surplus": float(self.num_surplus)}
        return metrics if self.without_signal is None else metrics | {"rollout/groups_without_signal": self.without_signal}

    def dropped(self, group_size: int) -> dict[str, float]:
        """The account (`aligner.loop.learnt`) of sampled responses that were not chosen."""
        rows, surplus = len(self.sampled.episodes) - len(self.chosen.episodes), self.num_surplus * group_size
        if not rows:
            return {}
        tokens = sum(one.num_written for one in self.sampled.rollouts) - sum(one.num_written for one in self.chosen.rollouts)
        return accounted(samples=0, seen=rows, surplus=surplus, no_signal=rows - surplus) | {TOKENS_SEEN: float(tokens)}


def groups_of(source: RolloutSource, step: int, clock: Clock, config: Any) -> Groups:
    """The groups that a step learns from, by the settings of GRPO. Collective: every rank sees the same rewards.

    With `dynamic_sampling` (DAPO, 2503.14476, section 3.2) `prompts_per_step` groups whose rewards differ, of as many rounds as that takes:
    the advantages of the others are 0. The surplus of the last round is dropped, as DAPO's own code (verl) does, since later steps would
    train on samples of older weights. Raises RunHalted if `max_rounds_per_step` were not enough and that is to end the run.
    """
    group_size, num_groups, max_rounds = config.group_size, config.prompts_per_step, config.max_rounds_per_step
    taken = [source.take(step, clock)]
    if not config.dynamic_sampling:
        without_signal = _share_without(has_signal(taken[0], group_size)) if group_size > 1 else None
        return Groups(sampled=taken[0], chosen=taken[0], num_rounds=1, num_surplus=0, without_signal=without_signal)
    while len(taken) < max_rounds and sum(int(has_signal(one, group_size).sum()) for one in taken) < num_groups:
        taken.append(source.take(step, clock))
    sampled = joined(taken)
    signal = has_signal(sampled, group_size)
    useful = signal.nonzero().flatten()
    if len(useful) < num_groups and config.exhausted is Exhausted.stop:
        raise RunHalted(
            f"step {step}: {len(useful)} of {len(signal)} groups have rewards that differ, and {num_groups} are needed, after "
            f"algorithm.max_rounds_per_step={max_rounds} rounds: the prompts are too easy or too hard, or the reward is uninformative "
            f"(algorithm.exhausted=fill continues with the groups that exist)"
        )
    chosen = torch.cat([useful, (~signal).nonzero().flatten()])[:num_groups].sort().values
    episodes = (chosen[:, None] * group_size + torch.arange(group_size)).flatten()
    return Groups(
        sampled=sampled,
        chosen=sampled.select(sampled.episodes.rows_of(episodes)),
        num_rounds=len(taken),
        num_surplus=max(0, len(useful) - num_groups),
        without_signal=_share_without(signal),
    )


def has_signal(collected: ScoredRollouts, group_size: int) -> Tensor:
    """bool [groups]: whether not all valid rewards of the group are equal. The rewards are those of the judges, before any shaping."""
    rows = collected.episodes
    return with_spread(rows.per_episode(collected.rewards), rows.per_episode(collected.valid), group_size)[::group_size]


def _share_without(signal: Tensor) -> float:
    return (~signal).double().mean().item()


class KLIn(str, Enum):
    """Where the KL to the reference enters."""

    loss = "loss"  # a term with gradient of its own
    reward = "reward"  # taken off the reward of every token; of the policy that sampled, without gradient


@dataclass(kw_only=True, slots=True)
class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO and its variants."""

    prompts_per_step: int = 64  # prompts of a training step, each with group_size responses
    group_size: int = 8  # responses per prompt
    mini_batch_size: int = 512  # responses per policy update
    # grpo, rloo, remax, reinforce, reinforce_pp, reinforce_pp_baseline, per_turn, gigpo, or my_file.py:function (docs/critic_free.md)
    advantage_estimator: str = Estimator.grpo.value  # how advantages come from rewards: grpo compares with the group's mean
    normalize_std: bool = True  # of advantage_estimator=grpo, per_turn, gigpo: divide by the group's standard deviation
    std_epsilon: float = STD_EPSILON  # with normalize_std: added to the deviation; 1e-4 in TRL
    gamma: float = 1.0  # discount per token, of estimators that have an advantage per token; per turn of per_turn and gigpo
    step_weight: float = 1.0  # of advantage_estimator=gigpo: of a turn's own advantage, beside the whole episode's
    kl_coef: float = 0.001  # of the KL to the reference; 0: no reference policy at all
    kl_in: KLIn = KLIn.loss  # loss: the KL is a term with a gradient of its own; reward: it is taken off each token's reward
    kl_estimator: KLEstimator = KLEstimator.k3  # per-token estimator of the KL to the reference (Schulman 2020)
    aggregation: Aggregation = Aggregation.sequence_mean
    mask_truncated: bool = False  # leave responses that were cut at the length limit out of the loss; they count in their group
    dynamic_sampling: bool = False  # learn from groups whose rewards differ; sample further rounds until there are prompts_per_step of them
    max_rounds_per_step: int = 10  # of dynamic_sampling
    exhausted: Exhausted = Exhausted.stop  # where these were not enough

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("prompts_per_step", "group_size", "max_rounds_per_step"))
        check_numbers(self, "algorithm", not_negative=("step_weight",))
        check_range(self, "algorithm", FINITE, "std_epsilon")
        self.advantage_estimator = text_of(self.advantage_estimator)
        check_estimator(named("algorithm.advantage_estimator", self.advantage_estimator, Estimator), self)
        if self.rollouts_per_step % self.mini_batch_size:
            raise ConfigError(
                f"algorithm.mini_batch_size={self.mini_batch_size}: must divide prompts_per_step * group_size = {self.rollouts_per_step}"
            )

    @property
    def rollouts_per_step(self) -> int:
        """Responses that one training step learns from."""
        return self.prompts_per_step * self.group_size

    @property
    def greedy_per_round(self) -> int:
        """Responses that are sampled besides, for their rewards."""
        return self.prompts_per_step if self.advantage_estimator == Estimator.remax.value else 0

    def resolved_estimator(self) -> Estimator | UserEstimator:
        """One of ours, or the user's function. Raises ConfigError if that cannot be imported, or called."""
        return resolve("algorithm.advantage_estimator", self.advantage_estimator, Estimator, ("rewards", "mask", "group_ids"))

    @property
    def needs_reference(self) -> bool:
        """Whether a step asks the reference policy for log-probs."""
        return self.kl_coef > 0

    @property
    def warnings(self) -> list[str]:
        """Settings that are allowed but probably a mistake."""
        if self.needs_reference and self.kl_in is KLIn.loss and self.kl_estimator is KLEstimator.k1:
            return ["algorithm.kl_estimator=k1 in the loss holds nothing: its gradient is 0 on average (k2, k3, or kl_in=reward do)"]
        return []

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step begins with a pass for the log-probs of the policy that it starts from."""
        return self.updates_per_step > 1 or (self.needs_reference and self.kl_in is KLIn.reward)


class GRPO(OnlineAlgorithm[GRPOConfig]):
    """The algorithm over its parts. Every rank constructs one. `rollout_source`: None: rollouts are sampled when they are needed."""

    def __init__(self, config: GRPOConfig, policy: Policy, task: OnlineTask, rollout_source: RolloutSource | None = None) -> None:
        greedy = config.greedy_per_round > 0
        super().__init__(config, policy, task, rollout_source, group_size=config.group_size, greedy=greedy)
        self.advantage_estimator = config.resolved_estimator()
        self.kl_coef = config.kl_coef
        self.moments = Moments()  # of the scores so far

    def step(self, step: int, clock: Clock) -> StepResult:
        task, config = self.task, self.config
        self.policy.sleep()  # a checkpoint may have woken it
        groups = groups_of(self.rollout_source, step, clock, config)
        batch = rollout_batch(groups.chosen.rollouts, task.pad_id)
        old_logprobs = ref_logprobs = entropy = None
        if config.needs_old_logprobs:
            with clock.phase("logprobs"):
                found = self.policy.per_token(batch, "logprobs", "entropy")
                old_logprobs, entropy = found["logprobs"], found["entropy"]
        if task.reference is not None:
            with clock.phase("ref_logprobs"):
                ref_logprobs = task.reference.logprobs(batch)
        rewarded = shaped(groups.chosen, batch, config.shaping, self.moments, max_length=task.max_response_length)
        policy_batch = self.experience(batch, rewarded.collected, old_logprobs, ref_logprobs)
        with clock.phase("train"):
            loss = self.loss()
            key, episodes = f"{task.seed}/{step}", groups.chosen.episodes
            parts = mini_batches(policy_batch, config.mini_batch_size, config.num_epochs, key=key, episodes=episodes)
            policy_metrics = values(merge([self.policy.train_step(part, loss) for part in parts]))
        self.sample_again()
        self.moments = rewarded.moments
        metrics = response_metrics(groups.sampled, clock.seconds["time/generate"]) | policy_metrics | dict(rewarded.metrics)
        metrics |= task.shares(groups.sampled.rollouts) | groups.metrics() | self._hold_kl(policy_batch, old_logprobs, policy_metrics)
        weighs = policy_batch.loss_mask & (policy_batch.advantages != 0)
        cut = batch.truncated if config.mask_truncated else torch.zeros_like(batch.truncated)
        learnt = of_rows(weighs, batch.loss_mask, no_reward=~groups.chosen.valid, truncated=cut, no_signal=torch.ones_like(cut))
        metrics |= totals([learnt, groups.dropped(config.group_size)])
        known = {"trainer": old_logprobs, "entropy": entropy, "reference": ref_logprobs, "advantage": policy_batch.advantages}
        return StepResult(metrics=metrics, samples=sample_rows(groups.chosen, task.decode, per_token=known))

    def experience(
        self, batch: RolloutBatch, collected: ScoredRollouts, old_logprobs: Tensor | None, ref_logprobs: Tensor | None
    ) -> PolicyBatch:
        """Advantages of one batch of rollouts with shaped rewards, whose rows are in group order.

        Episodes without a valid reward are not trained on, nor is one that is then alone in a group that is compared; the statistics of a
        group are those of the others. An episode's sequences count as one long response.
        """
        config, mask, rows = self.config, batch.loss_mask, collected.episodes
        # By position, not by prompt: a batch that straddles an epoch may hold the same prompt in two groups.
        groups, scores, long_mask = rows.groups_of(config.group_size), rows.per_episode(collected.rewards), rows.joined(mask)
        valid = rows.per_episode(collected.valid)
        if ref_logprobs is not None and config.kl_in is KLIn.reward:
            kl = kl_estimate(require(old_logprobs, "old_logprobs"), ref_logprobs, config.kl_estimator)
            kl = rows.joined(kl)
            valid = valid & finite_rows(kl * long_mask, self.task.guard, "the KL to the reference")
            rewards = shaped_rewards(scores, long_mask, kl, self.kl_coef, valid)
        else:
            rewards = outcome_rewards(scores, long_mask, valid)
        advantages = estimate(
            self.advantage_estimator,
            rewards,
            long_mask,
            groups,
            baselines=None if collected.baselines is None else rows.per_episode(collected.baselines),
            valid=valid,
            gamma=config.gamma,
            normalize_std=config.normalize_std,
            std_epsilon=config.std_epsilon,
            turns=turns_of(collected.rollouts, rows, mask) if self.advantage_estimator in TURNED else None,
            step_weight=config.step_weight,
        )
        mask = mask & rows.per_row(counted_rows(self.advantage_estimator, groups, valid))[:, None]
        if config.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        found = of_kind(
            PolicyBatch,
            batch,
            loss_mask=mask,
            old_logprobs=old_logprobs if config.updates_per_step > 1 else None,
            advantages=rows.split(advantages) * mask,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs if self.task.compares_logprobs else None,
        )
        return as_episodes(found, rows)

    def loss(self) -> Loss[PolicyBatch]:
        """The policy loss with the current KL coefficient."""
        config = self.config
        kl_coef = self.kl_coef if config.kl_in is KLIn.loss else 0.0
        return config.loss(max_response_length=self.task.max_response_length, kl_coef=kl_coef, kl_estimator=config.kl_estimator)

    def state(self) -> dict[str, Any]:
        return super().state() | {"kl_coef": self.kl_coef, "shaping": asdict(self.moments)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = state["kl_coef"] if self.config.kl_target else self.config.kl_coef
        self.moments = Moments(**state["shaping"])
        super().load_state(state)

    def _hold_kl(self, batch: PolicyBatch, old_logprobs: Tensor | None, measured: Mapping[str, float]) -> dict[str, float]:
        """Move the coefficient by the KL that was observed, in the reward or by the loss. What is reported of the two."""
        config = self.config
        if batch.ref_logprobs is None or not batch.loss_mask.any():
            return {}
        metrics = {"policy/kl_coef": self.kl_coef}
        if config.kl_in is KLIn.reward:
            kl = kl_estimate(require(old_logprobs, "old_logprobs"), batch.ref_logprobs, config.kl_estimator)
            metrics["policy/kl"] = masked_mean(kl, batch.loss_mask)
        if config.kl_target:
            observed = metrics["policy/kl"] if config.kl_in is KLIn.reward else measured["policy/ref_kl"]
            if math.isfinite(observed):  # else an update that was left out has said so
                self.kl_coef = adapt_kl_coef(self.kl_coef, observed, config.kl_target, config.kl_horizon, num_rows(batch))
        return metrics


COLUMNS = (
    *REWARDED,
    Column("KL", "policy/ref_kl", ".4f"),
)


@dataclass(kw_only=True, slots=True)
class TrainGRPO(OnlineRun):
    """GRPO and its variants (conf/grpo/grpo.yaml)."""

    plays_sessions: ClassVar[bool] = True
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        self.algorithm.shaping.check_length(self.rollout.sampling.longest)

    def traits(self) -> Traits:
        settings = self.algorithm
        old = (Phase.logprobs,) if settings.needs_old_logprobs else ()
        return self.actor_traits(phases=old, has_reference=settings.needs_reference, extra_rows=settings.greedy_per_round)


def build(job: OnlineJob[TrainGRPO]) -> Built:
    settings = job.config.algorithm
    settings.resolved_estimator()  # before anything is loaded: it may be a file of the user's
    for warning in settings.warnings:
        job.session.say(f"warning: {warning}")
    task = job.task(with_reference=settings.needs_reference, num_prompts=settings.prompts_per_step)
    job.ready()
    greedy, takes_more = settings.greedy_per_round > 0, settings.dynamic_sampling
    rollout_source = job.rollout_source(task, group_size=settings.group_size, greedy=greedy, takes_more=takes_more)
    return Built(algorithm=GRPO(settings, job.policy, task, rollout_source), model=job.policy.model)


RECIPE = Recipe(name="grpo", config=TrainGRPO, build=build, columns=COLUMNS)
