"""Proximal policy optimisation with a learned critic (Schulman et al. 2017, 1707.06347; for language models Ziegler et al. 2019).

One step: sample responses; reward and values of finished ones are asked for while others are still being sampled; log-probs of policy and
frozen reference; per-token rewards (minus `kl_coef` times a KL estimate, plus the score on the last token); GAE (1506.02438); advantages
whitened over the whole batch; the critic trains on the returns in its own process while the policy takes its mini-batch updates.

Against GRPO (`grpo.py`): a critic gives every token its own advantage from one response per prompt, and the KL is part of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.experience import finite_rows, masked_mean, mini_batches, shaped
from aligner.algorithms.learnt import of_rows
from aligner.algorithms.loop import Clock, StepResult
from aligner.algorithms.objective import ObjectiveConfig
from aligner.algorithms.online import OnlineTask
from aligner.algorithms.rollouts import ScoredRollouts, response_metrics, sample_rows
from aligner.algorithms.rounds import OnPolicyRounds, Rounds
from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.losses.advantages import gae, outcome_rewards, whiten
from aligner.losses.kl import KLEstimator, adapt_kl_coef, kl_estimate
from aligner.losses.shaping import Moments, ShapingConfig
from aligner.losses.value import explained_variance
from aligner.metrics import Metric, merge, values
from aligner.models.guard import judge_reply
from aligner.parallel.collectives import from_rank_0
from aligner.protocols import Critic, Policy
from aligner.types import PolicyBatch, RolloutBatch, ValueBatch


@dataclass(kw_only=True, slots=True)
class PPOConfig(ObjectiveConfig):
    """Defaults are NeMo-Aligner's where it has the setting."""

    rollouts_per_step: int = 512  # one per prompt
    mini_batch_size: int = 128  # rollouts per policy update
    num_epochs: int = 1  # passes over a step's rollouts
    kl_coef: float = 0.02  # of the KL to the reference, inside the reward
    kl_estimator: KLEstimator = KLEstimator.k1
    kl_target: float = 0.0  # 0: fixed coefficient; else adaptive (Ziegler et al. 2019) towards this KL per response token
    kl_horizon: int = 10000  # rollouts over which the adaptive coefficient moves
    gamma: float = 1.0
    gae_lambda: float = 0.95
    mask_truncated: bool = False  # leave responses that were cut at the length limit out of the losses
    shaping: ShapingConfig = field(default_factory=ShapingConfig)  # of scores, before the KL is taken off
    critic_warmup_steps: int = 0  # first steps, in which only the critic trains

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        for name in ("rollouts_per_step", "mini_batch_size", "num_epochs", "kl_horizon"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be at least 1")
        if self.rollouts_per_step % self.mini_batch_size:
            raise ConfigError(f"algorithm.mini_batch_size={self.mini_batch_size}: must divide rollouts_per_step={self.rollouts_per_step}")
        for name in ("kl_coef", "kl_target", "critic_warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must not be negative")
        if self.kl_target and not self.kl_coef:
            raise ConfigError(f"algorithm.kl_target={self.kl_target}: moves kl_coef=0, which stays 0; allowed: 0, or kl_coef above 0")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be between 0 and 1")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one training step."""
        return self.rollouts_per_step // self.mini_batch_size * self.num_epochs


class PPO:
    """The algorithm over its parts. Every rank of the actor constructs one; rank 0 alone holds a critic for training.

    `rounds`: where rollouts with their values come from, one per prompt; None: sampled when they are needed.
    """

    def __init__(self, config: PPOConfig, policy: Policy, task: OnlineTask, critic: Critic, rounds: Rounds | None = None) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.critic = critic
        self.rounds = rounds or OnPolicyRounds(task, 1, critic=critic)
        self.kl_coef = config.kl_coef
        self.moments = Moments()  # of the scores so far
        self._critic_training: Future[dict[str, float]] | None = None  # rank 0's; awaited in the next step
        self._critic_is_training = False  # the same on every rank
        self._critic_step = 0  # whose rollouts it trains on
        self._critic_metrics: dict[str, float] = {}  # of a training that was awaited and is not reported yet
        self._mark_before: str | None = None  # the critic's before the step under way: what that one sends is not part of the state
        self.loss = config.loss(max_response_length=task.max_response_length)

    def step(self, step: int, clock: Clock) -> StepResult:
        task = self.task
        with clock.phase("critic_wait"):
            self._await_critic()  # values must come from the critic that finished the step before
        self._mark_before = self.critic.mark
        critic_metrics, self._critic_metrics = self._critic_metrics, {}
        self.policy.sleep()  # a checkpoint may have woken it
        collected = self.rounds.take(step, clock)
        batch = rollout_batch(collected.rollouts, task.pad_id)
        with clock.phase("logprobs"):
            old_logprobs = self.policy.logprobs(batch)
        with clock.phase("ref_logprobs"):
            ref_logprobs = task.reference.logprobs(batch)
        kl = kl_estimate(old_logprobs, ref_logprobs, self.config.kl_estimator)
        rewarded = shaped(collected, batch, self.config.shaping, self.moments, max_length=task.max_response_length)
        policy_batch, value_batch = self.experience(batch, rewarded.collected, old_logprobs, kl)
        self._start_critic(value_batch, step)
        with clock.phase("train"):
            policy_metrics = self._update_policy(policy_batch, step)
        self.policy.sleep()  # sampling comes next
        self.rounds.trained(self.policy.version)
        self.moments = rewarded.moments
        used_kl_coef, mean_kl = self.kl_coef, masked_mean(kl, batch.loss_mask)
        if self.config.kl_target and not self._is_warming_up(step) and math.isfinite(mean_kl):
            self.kl_coef = adapt_kl_coef(self.kl_coef, mean_kl, self.config.kl_target, self.config.kl_horizon, len(collected.rollouts))
        metrics = response_metrics(collected, clock.seconds["time/generate"]) | values(policy_metrics) | critic_metrics
        metrics |= {"policy/kl": mean_kl, "policy/kl_coef": used_kl_coef} | dict(rewarded.metrics)
        # The critic's batch: while it warms up it is the only one that learns.
        metrics |= of_rows(value_batch.loss_mask, batch.loss_mask, no_reward=~collected.valid, truncated=batch.truncated)
        self._mark_before = None
        return StepResult(metrics=metrics, samples=sample_rows(collected, task.decode))

    def experience(
        self, batch: RolloutBatch, collected: ScoredRollouts, old_logprobs: Tensor, kl: Tensor
    ) -> tuple[PolicyBatch, ValueBatch]:
        """Advantages and returns of one batch of rollouts with shaped rewards. `kl` is the per-token estimate, float32 [B, S]."""
        config, mask = self.config, batch.loss_mask
        old_values = torch.zeros_like(old_logprobs)
        for row, own in enumerate(collected.values):
            old_values[row, : own.shape[0]] = own
        rewards = outcome_rewards(collected.rewards, mask, collected.valid) - self.kl_coef * kl * mask
        advantages, returns = gae(rewards, old_values, mask, config.gamma, config.gae_lambda)
        finite = finite_rows(returns, self.task.guard, "the returns")
        advantages, returns = (torch.where(finite[:, None], x, 0.0) for x in (advantages, returns))
        mask = mask & (collected.valid & finite)[:, None]
        if config.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        common = {"tokens": batch.tokens, "lengths": batch.lengths, "loss_mask": mask}
        policy_batch = PolicyBatch(
            **common,
            old_logprobs=old_logprobs,
            advantages=whiten(advantages, mask),
            rollout_logprobs=batch.rollout_logprobs if self.task.compares_logprobs else None,
        )
        return policy_batch, ValueBatch(**common, old_values=old_values, returns=returns)

    def validate(self) -> Mapping[str, float]:
        return self.task.validate()

    def finish(self) -> None:
        """Wait for the critic; raises its error on every rank."""
        self._await_critic()

    def state(self) -> dict[str, Any]:
        mark = self.critic.mark if self._mark_before is None else self._mark_before
        moments = asdict(self.moments)
        return {"kl_coef": self.kl_coef, "shaping": moments, "critic_metrics": self._critic_metrics, "critic_mark": mark}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
        if "shaping" in state:  # checkpoints from before there was any have none
            self.moments = Moments(**state["shaping"])
        self._critic_metrics = dict(state["critic_metrics"])
        mark = state["critic_mark"]
        from_rank_0(lambda: self.critic.resume(mark))
        self.critic.follow(mark)
        self.rounds.load_state({}, self.policy.version)  # every step takes one round

    def _is_warming_up(self, step: int) -> bool:
        """Whether only the critic trains: what the KL of a policy that stands still is, says nothing about its coefficient."""
        return step <= self.config.critic_warmup_steps

    def _update_policy(self, batch: PolicyBatch, step: int) -> dict[str, Metric]:
        if self._is_warming_up(step):
            return {}
        parts = mini_batches(batch, self.config.mini_batch_size, self.config.num_epochs, key=f"{self.task.seed}/{step}")
        return merge([self.policy.train_step(part, self.loss) for part in parts])

    def _start_critic(self, batch: ValueBatch, step: int) -> None:
        if not batch.loss_mask.any():  # every response was cut and is masked: nothing to learn from
            return
        self._critic_training = self.critic.train(batch, step) if self.task.topology.rank == 0 else None
        self._critic_is_training, self._critic_step = True, step

    def _await_critic(self) -> None:
        if not self._critic_is_training:
            return
        self._critic_is_training = False
        training = self._critic_training
        metrics, mark = from_rank_0(lambda: (training.result(), self.critic.mark))
        self.critic.follow(mark)
        judge_reply(self.task.guard, metrics, step=self._critic_step)
        metrics = metrics | {"explained_variance": explained_variance(metrics)}
        self._critic_metrics = {f"critic/{name.removeprefix('value/').replace('/', '_')}": value for name, value in metrics.items()}
