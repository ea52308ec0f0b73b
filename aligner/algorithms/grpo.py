"""Group relative policy optimisation (Shao et al. 2024, 2402.03300): no critic.

One step: sample `group_size` responses to each prompt; a response's advantage is its reward minus its group's mean (over the group's
standard deviation), the same for all its tokens; the KL to the reference is a term of the loss (k3), not of the reward.
Dr. GRPO (2503.20783) is `normalize_std=false` with `aggregation=sequence_sum_constant`; DAPO's clip-higher is `clip_eps_high`.

Where a step's rollouts are used for exactly one update, the policy that is trained is the one that sampled: the ratio is 1 with gradient,
and no separate pass for the old log-probs is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.loop import Clock, StepResult
from aligner.algorithms.objective import ObjectiveConfig
from aligner.algorithms.online import OnlineTask
from aligner.algorithms.rollouts import collect, mini_batches, response_metrics, sample_rows, sample_seeds
from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.losses.advantages import group_advantages
from aligner.losses.aggregation import Aggregation
from aligner.losses.kl import KLEstimator
from aligner.metrics import merge, values
from aligner.protocols import Policy
from aligner.types import PolicyBatch, RolloutBatch


@dataclass(kw_only=True, slots=True)
class GRPOConfig(ObjectiveConfig):
    """Settings of GRPO."""

    prompts_per_step: int = 64
    group_size: int = 8  # responses per prompt
    mini_batch_size: int = 512  # responses per policy update
    num_epochs: int = 1
    normalize_std: bool = True
    kl_coef: float = 0.001  # of the KL to the reference, in the loss; 0: no reference policy at all
    kl_estimator: KLEstimator = KLEstimator.k3
    aggregation: Aggregation = Aggregation.sequence_mean
    mask_truncated: bool = False  # leave responses that were cut at the length limit out of the loss

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        for name in ("prompts_per_step", "mini_batch_size", "num_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be at least 1")
        if self.group_size < 2:
            raise ConfigError(f"algorithm.group_size={self.group_size}: a group needs at least 2 responses to compare")
        if self.rollouts_per_step % self.mini_batch_size:
            raise ConfigError(
                f"algorithm.mini_batch_size={self.mini_batch_size}: must divide prompts_per_step * group_size = {self.rollouts_per_step}"
            )
        if self.kl_coef < 0:
            raise ConfigError(f"algorithm.kl_coef={self.kl_coef}: must not be negative")

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled in one training step."""
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one training step."""
        return self.rollouts_per_step // self.mini_batch_size * self.num_epochs


class GRPO:
    """The algorithm over its parts. Every rank constructs one."""

    def __init__(self, config: GRPOConfig, policy: Policy, task: OnlineTask) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.loss = config.loss(max_response_length=task.max_response_length, kl_coef=config.kl_coef, kl_estimator=config.kl_estimator)

    def step(self, step: int, clock: Clock) -> StepResult:
        task, config = self.task, self.config
        prompts = [prompt for prompt in task.prompts(step) for _ in range(config.group_size)]
        seeds = sample_seeds(task.seed, step, len(prompts))
        self.policy.sleep()  # a checkpoint may have woken it
        with clock.phase("generate"):
            collected = collect(task.engine, prompts, seeds, scorers=task.scorers())
        batch = rollout_batch(collected.rollouts, task.pad_id)
        old_logprobs = ref_logprobs = None
        if config.updates_per_step > 1:
            with clock.phase("logprobs"):
                old_logprobs = self.policy.logprobs(batch)
        if task.reference is not None:
            with clock.phase("ref_logprobs"):
                ref_logprobs = task.reference.logprobs(batch)
        policy_batch = self.experience(batch, collected.rewards, old_logprobs, ref_logprobs, valid=collected.valid)
        with clock.phase("train"):
            parts = mini_batches(policy_batch, config.mini_batch_size, config.num_epochs, key=f"{task.seed}/{step}")
            policy_metrics = merge([self.policy.train_step(part, self.loss) for part in parts])
        self.policy.sleep()  # sampling comes next
        task.engine.refit(self.policy.version)
        metrics = response_metrics(collected, clock.seconds["time/generate"]) | values(policy_metrics)
        groups = collected.rewards.view(-1, config.group_size)
        metrics["rollout/groups_without_signal"] = (groups == groups[:, :1]).all(dim=1).double().mean().item()
        return StepResult(metrics=metrics, samples=sample_rows(collected, task.decode))

    def experience(
        self,
        batch: RolloutBatch,
        rewards: Tensor,
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
        *,
        valid: Tensor | None = None,
    ) -> PolicyBatch:
        """Group advantages of one batch of rollouts, whose rows are in group order. `rewards` float32 [B].

        Rows that are not in `valid` (bool [B]; None: all are) have no reward: neither they nor a row that is then alone in its group is
        learnt from, and the statistics of a group are those of the others.
        """
        config, mask = self.config, batch.loss_mask
        # By position, not by prompt: a batch that straddles an epoch may hold the same prompt in two groups.
        groups = torch.arange(rewards.shape[0]) // config.group_size
        counted = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
        counted = counted & (groups[counted].bincount(minlength=len(groups)) > 1)[groups]
        advantages = torch.zeros_like(rewards)
        if counted.any():
            advantages[counted] = group_advantages(rewards[counted], groups[counted], normalize_std=config.normalize_std)
        mask = mask & counted[:, None]
        if config.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        return PolicyBatch(
            tokens=batch.tokens,
            lengths=batch.lengths,
            loss_mask=mask,
            old_logprobs=old_logprobs,
            advantages=advantages[:, None] * mask,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs if self.task.compares_logprobs else None,
        )

    def validate(self) -> Mapping[str, float]:
        return self.task.validate()

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is no state besides the models and the step number; the engine takes the checkpoint's weights."""
        self.task.engine.refit(self.policy.version)
