"""Rejection-sampling fine-tuning: supervised training on the best of the policy's own samples (RAFT, Dong et al. 2023, 2304.06767;
best-of-n distillation, as in Llama 2, 2307.09288).

One step: sample `group_size` responses to each prompt; score them; the `keep` best of each are examples for token cross-entropy,

    loss = -sum over kept response tokens of log pi / their number.

A session of several rows is one response: all of its rows are kept, or none.

Against GRPO (`grpo.py`): the rest is thrown away instead of being pushed down, so that neither old nor reference log-probs are needed and
a stale sampler does no harm; against SFT (`sft.py`): the data are the policy's own and move with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

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
from aligner.run.settings import Traits
from aligner.types import EpisodeRows, LabeledBatch, RolloutBatch
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
                rows = collected.episodes.rows_of(kept)
                metrics |= self.update(self.examples(batch, rows), self.loss, step, collected.episodes.take(rows))
        return self.result(collected, metrics)

    def select(self, batch: RolloutBatch, collected: ScoredRollouts) -> Tensor:
        """The episodes (where each is one row: the rows), int64 and ascending, that are trained on."""
        config, rows = self.config, collected.episodes
        rewards, valid = rows.per_episode(collected.rewards), rows.per_episode(collected.valid)
        allowed = valid & with_spread(rewards, valid, config.group_size) if config.require_spread else valid
        if config.drop_truncated:
            allowed = allowed & ~self._cut(batch, rows)
        return best_rows(rewards, allowed, group_size=config.group_size, keep=config.keep, min_reward=config.min_reward)

    def examples(self, batch: RolloutBatch, kept: Tensor) -> LabeledBatch:
        """The kept rows with their prompts; the policy's own tokens are trained on."""
        rows = take_rows(batch, kept)
        return of_kind(LabeledBatch, rows, rollout_logprobs=rows.rollout_logprobs if self.task.compares_logprobs else None)

    def kept_metrics(self, kept: Tensor, batch: RolloutBatch, collected: ScoredRollouts) -> dict[str, float]:
        """How much was kept, and of it the mean reward and length; those of nothing are left out."""
        with_any, rows = (kept // self.config.group_size).unique().numel(), collected.episodes
        metrics = {
            "kept/fraction": len(kept) / len(rows),
            "kept/prompts_without_any": 1 - with_any / self.config.prompts_per_step,
        }
        if len(kept):
            metrics["kept/reward"] = rows.per_episode(collected.rewards)[kept].double().mean().item()
            metrics["kept/response_length"] = rows.total(batch.loss_mask.sum(dim=1))[kept].double().mean().item()
        return metrics

    def account(self, kept: Tensor, batch: RolloutBatch, collected: ScoredRollouts) -> dict[str, float]:
        """The responses trained on, and why the rest was not."""
        config, rows = self.config, collected.episodes
        learnt = rows.per_row(torch.isin(torch.arange(len(rows)), kept))
        spread = with_spread(rows.per_episode(collected.rewards), rows.per_episode(collected.valid), config.group_size)
        never = torch.zeros_like(learnt)
        return of_rows(
            batch.loss_mask & learnt[:, None],
            batch.loss_mask,
            no_reward=~collected.valid,
            truncated=rows.per_row(self._cut(batch, rows)) if config.drop_truncated else never,
            no_signal=~rows.per_row(spread) if config.require_spread else never,
            below_min_reward=never if config.min_reward is None else collected.rewards < config.min_reward,
            not_best=~never,
        )

    def _cut(self, batch: RolloutBatch, rows: EpisodeRows) -> Tensor:
        """The episodes of which a row was cut, bool."""
        return rows.total(batch.truncated.long()) > 0


COLUMNS = (
    *REWARDED,
    Column("kept reward", "kept/reward", ".3f"),
    Column("kept", "kept/fraction", "percent"),
    Column("loss", "sft/loss", ".4f", Goal.lowest),
)


@dataclass(kw_only=True, slots=True)
class TrainRejectionSampling(OnlineRun):
    """Supervised fine-tuning on the best of the policy's own samples (conf/rejection_sampling/rejection_sampling.yaml)."""

    plays_sessions: ClassVar[bool] = True
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
