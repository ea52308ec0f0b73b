"""Rejection-sampling fine-tuning: supervised training on the best of the policy's own samples (RAFT, Dong et al. 2023, 2304.06767;
best-of-n distillation, as in Llama 2, 2307.09288).

One step: sample `group_size` responses to each prompt; score them; the `keep` best of each are examples for token cross-entropy,

    loss = -sum over kept response tokens of log pi / their number.

Against GRPO (`grpo.py`): the rest is thrown away instead of being pushed down, so that neither old nor reference log-probs are needed and
a stale sampler does no harm; against SFT (`sft.py`): the data are the policy's own and move with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.errors import ConfigError, check_numbers
from aligner.loop.learnt import of_rows
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.correction import with_gap
from aligner.losses.sft import sft_loss
from aligner.online.collect import ScoredRollouts, response_metrics
from aligner.online.config import OnlineRun
from aligner.online.rollout_source import OnlineAlgorithm, RolloutSource
from aligner.online.selection import best_rows, with_spread
from aligner.online.task import REWARDED, OnlineTask
from aligner.protocols import Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.traits import Traits
from aligner.types import LabeledBatch, RolloutBatch
from aligner.types.batches import of_kind
from aligner.types.rows import take_rows

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob


@dataclass(kw_only=True, slots=True)
class RejectionSamplingConfig:
    """Settings of rejection sampling."""

    prompts_per_step: int = 64  # prompts of a training step, each with group_size responses
    group_size: int = 8  # responses sampled per prompt
    keep: int = 1  # of them, the best ones, that are trained on
    mini_batch_size: int = 64  # kept responses per update, at most
    num_epochs: int = 1  # passes over a step's kept responses
    min_reward: float | None = None  # responses with less are never kept
    require_spread: bool = False  # keep nothing of a prompt whose responses all have the same reward
    drop_truncated: bool = True  # never keep a response that was cut at the length limit: it would be learnt without its end

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", at_least_1=("prompts_per_step", "group_size", "keep", "mini_batch_size", "num_epochs"))
        if self.keep > self.group_size:
            raise ConfigError(f"algorithm.keep={self.keep}: must be at most group_size={self.group_size}")

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled in one training step."""
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one training step in which every prompt has as many responses to keep as it may."""
        return -(-self.prompts_per_step * self.keep // self.mini_batch_size) * self.num_epochs


class RejectionSampling(OnlineAlgorithm[RejectionSamplingConfig]):
    """The algorithm over its parts. Every rank constructs one. `rollout_source`: None: rollouts are sampled when they are needed."""

    def __init__(
        self, config: RejectionSamplingConfig, policy: Policy, task: OnlineTask, rollout_source: RolloutSource | None = None
    ) -> None:
        super().__init__(config, policy, task, rollout_source, group_size=config.group_size)
        self.loss = with_gap(sft_loss)

    def step(self, step: int, clock: Clock) -> StepResult:
        collected, batch = self.sample(step, clock)
        kept = self.select(batch, collected)
        metrics = response_metrics(collected, clock.seconds["time/generate"]) | self.kept_metrics(kept, batch, collected)
        metrics |= self.account(kept, batch, collected)
        if len(kept):
            with clock.phase("train"):
                metrics |= self.update(self.examples(batch, kept), self.loss, step)
        return self.result(collected, metrics)

    def select(self, batch: RolloutBatch, collected: ScoredRollouts) -> Tensor:
        """The rows, int64 and ascending, that are trained on."""
        config, allowed = self.config, collected.valid
        if config.require_spread:
            allowed = allowed & with_spread(collected.rewards, collected.valid, config.group_size)
        if config.drop_truncated:
            allowed = allowed & ~batch.truncated
        return best_rows(collected.rewards, allowed, group_size=config.group_size, keep=config.keep, min_reward=config.min_reward)

    def examples(self, batch: RolloutBatch, kept: Tensor) -> LabeledBatch:
        """The kept responses with their prompts; the policy's own tokens are trained on."""
        rows = take_rows(batch, kept)
        return of_kind(LabeledBatch, rows, rollout_logprobs=rows.rollout_logprobs if self.task.compares_logprobs else None)

    def kept_metrics(self, kept: Tensor, batch: RolloutBatch, collected: ScoredRollouts) -> dict[str, float]:
        """How much was kept, and of it the mean reward and length; those of nothing are left out."""
        with_any = (kept // self.config.group_size).unique().numel()
        metrics = {
            "kept/fraction": len(kept) / len(collected.rollouts),
            "kept/prompts_without_any": 1 - with_any / self.config.prompts_per_step,
        }
        if len(kept):
            metrics["kept/reward"] = collected.rewards[kept].double().mean().item()
            metrics["kept/response_length"] = batch.loss_mask[kept].sum(dim=1).double().mean().item()
        return metrics

    def account(self, kept: Tensor, batch: RolloutBatch, collected: ScoredRollouts) -> dict[str, float]:
        """The responses trained on, and why the rest was not."""
        config, learnt = self.config, torch.zeros(len(collected.rollouts), dtype=torch.bool)
        learnt[kept] = True
        never = torch.zeros_like(learnt)
        return of_rows(
            batch.loss_mask & learnt[:, None],
            batch.loss_mask,
            no_reward=~collected.valid,
            truncated=batch.truncated if config.drop_truncated else never,
            no_signal=~with_spread(collected.rewards, collected.valid, config.group_size) if config.require_spread else never,
            below_min_reward=never if config.min_reward is None else collected.rewards < config.min_reward,
            not_best=~never,
        )


COLUMNS = (
    *REWARDED,
    Column("kept reward", "kept/reward", ".3f"),
    Column("kept", "kept/fraction", "percent"),
    Column("loss", "sft/loss", ".4f", Goal.lowest),
)


@dataclass(kw_only=True, slots=True)
class TrainRejectionSampling(OnlineRun):
    """Supervised fine-tuning on the best of the policy's own samples (conf/rejection_sampling/rejection_sampling.yaml)."""

    algorithm: RejectionSamplingConfig = field(default_factory=RejectionSamplingConfig)

    def traits(self) -> Traits:
        return self.actor_traits()


def build(job: OnlineJob[TrainRejectionSampling]) -> Built:
    settings = job.config.algorithm
    task = job.task(with_reference=False, num_prompts=settings.prompts_per_step)
    job.ready()
    rollout_source = job.rollout_source(task, group_size=settings.group_size)
    return Built(algorithm=RejectionSampling(settings, job.policy, task, rollout_source), model=job.policy.model)


RECIPE = Recipe(name="rejection_sampling", config=TrainRejectionSampling, build=build, columns=COLUMNS)
