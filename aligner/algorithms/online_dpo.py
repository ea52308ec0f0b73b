"""Online direct preference optimisation (Guo et al. 2024, 2402.04792): DPO on pairs of the policy's own samples.

One step: sample `group_size` responses to each prompt; score them; pair those of a prompt, the better one chosen (`pairing`), and drop
ties; log-probs of the frozen reference for the pairs; updates of the policy on a loss of `aligner.losses.preference`,

    -log sigma(beta ((l_chosen - ref_chosen) - (l_rejected - ref_rejected))).

Against DPO (`dpo.py`): the pairs are on-policy and never run out. Against GRPO (`grpo.py`): only the order of rewards matters, not their
size (but for the RPO losses), and beta inside the loss holds the policy near the reference. `reference_every` makes it iterative
(2312.11456): every so many steps the policy of then becomes the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aligner.algorithms.dpo import PairLossConfig
from aligner.errors import ConfigError, check_numbers
from aligner.loop.learnt import of_rows
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.aggregation import masked_mean, require
from aligner.losses.correction import with_gap
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.losses.preference import dpo_loss
from aligner.online.collect import ScoredRollouts, response_metrics, sample_seeds
from aligner.online.config import OnlineRun
from aligner.online.rollout_source import OnlineAlgorithm, RolloutSource
from aligner.online.selection import Pairing, Pairs, num_compared, pairs_of
from aligner.online.task import REWARDED, OnlineTask
from aligner.protocols import Policy, Reference
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits
from aligner.types import LossOutput, PreferenceBatch, RolloutBatch, TokenOutputs
from aligner.types.batches import of_kind
from aligner.types.rows import take_rows

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob


@dataclass(kw_only=True, slots=True)
class OnlineDPOConfig(PairLossConfig):
    """Settings of online DPO."""

    prompts_per_step: int = 64  # prompts of a training step, each with group_size responses
    group_size: int = 2  # responses sampled per prompt
    pairing: Pairing = Pairing.best_worst  # which of a prompt's responses are compared: best with worst, two at random, each with each
    min_gap: float = 0.0  # pairs whose rewards differ by no more than this are ties: dropped and counted
    missing_eos_penalty: float = 0.0  # taken from the reward of a response that was cut at the length limit, before pairing
    mini_batch_size: int = 64  # pairs per update, at most
    num_epochs: int = 1  # passes over a step's pairs
    reference_every: int = 0  # steps after which the policy of then becomes the reference; 0: it stays the model that the run starts from

    def __post_init__(self) -> None:
        PairLossConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("prompts_per_step", "mini_batch_size", "num_epochs"))
        if self.group_size < 2:
            raise ConfigError(f"algorithm.group_size={self.group_size}: a pair needs at least 2 responses")
        check_numbers(self, "algorithm", not_negative=("min_gap", "missing_eos_penalty", "reference_every"))
        if self.reference_every and not self.variant.needs_reference:
            raise ConfigError(f"algorithm.reference_every={self.reference_every}: loss={self.variant.value} has no reference; allowed: 0")

    @property
    def needs_reference(self) -> bool:
        """Whether a step asks the reference policy for log-probs."""
        return self.variant.needs_reference

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled in one training step."""
        return self.prompts_per_step * self.group_size

    @property
    def pairs_per_step(self) -> int:
        """Pairs that a step compares at most."""
        return self.prompts_per_step * num_compared(self.pairing, self.group_size)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one training step without a tie."""
        return -(-self.pairs_per_step // self.mini_batch_size) * self.num_epochs


class MovingReference(Reference, Protocol):
    """A frozen policy that may be replaced by the one that is trained. Collective."""

    def renew(self, step: int) -> None:
        """Make the current policy, which has finished `step`, the reference; it can be restored after a restart."""

    def restore(self, step: int) -> None:
        """Restore the reference that `renew(step)` made. Raises CheckpointError if it is not there."""


def online_dpo_loss(outputs: TokenOutputs, batch: PreferenceBatch, **settings: Any) -> LossOutput:
    """`dpo_loss`, with the KL of the policy to the reference (if there is one), k3 per token of the pairs, as `pairs/ref_kl`.

    These samples are selected: the best and the worst of many are further from the reference than the policy's average samples.
    """
    result = dpo_loss(outputs, batch, **settings)
    if batch.ref_logprobs is None:
        return result
    kl = masked_mean(kl_estimate(require(outputs.logprobs, "TokenOutputs.logprobs"), batch.ref_logprobs, KLEstimator.k3), batch.loss_mask)
    return LossOutput(total=result.total, count=result.count, metrics={**result.metrics, "pairs/ref_kl": kl})


class OnlineDPO(OnlineAlgorithm[OnlineDPOConfig]):
    """The algorithm over its parts, on every rank. `rollout_source` None: sampled when needed."""

    def __init__(
        self,
        config: OnlineDPOConfig,
        policy: Policy,
        task: OnlineTask,
        reference: MovingReference | None,
        rollout_source: RolloutSource | None = None,
    ) -> None:
        super().__init__(config, policy, task, rollout_source, group_size=config.group_size)
        self.reference = reference
        self.reference_step = 0  # after which the reference was the policy
        self.loss = with_gap(partial(online_dpo_loss, **config.settings()))

    def step(self, step: int, clock: Clock) -> StepResult:
        self._renew_reference(step - 1, clock)
        collected, batch = self.sample(step, clock)
        pairs = self.pair(batch, collected, seed=sample_seeds(self.task.seed, step, 1)[0])
        metrics = response_metrics(collected, clock.seconds["time/generate"]) | self.pair_metrics(pairs)
        paired = torch.zeros(len(collected.rollouts), dtype=torch.bool)
        paired[pairs.rows] = True
        metrics |= of_rows(batch.loss_mask & paired[:, None], batch.loss_mask, no_reward=~collected.valid, not_paired=~paired)
        if len(pairs.gaps):
            examples = self.examples(batch, pairs)
            if self.reference is not None:
                with clock.phase("ref_logprobs"):
                    examples = replace(examples, ref_logprobs=self.reference.logprobs(examples))
            with clock.phase("train"):
                metrics |= self.update(examples, self.loss, step)
        return self.result(collected, metrics)

    def pair(self, batch: RolloutBatch, collected: ScoredRollouts, *, seed: int) -> Pairs:
        """The pairs of one batch of rollouts."""
        config = self.config
        return pairs_of(
            collected.rewards - config.missing_eos_penalty * batch.truncated,
            collected.valid,
            group_size=config.group_size,
            pairing=config.pairing,
            min_gap=config.min_gap,
            seed=seed,
        )

    def examples(self, batch: RolloutBatch, pairs: Pairs) -> PreferenceBatch:
        """The pairs as rows: no pass is made over responses that are in none."""
        rows = take_rows(batch, pairs.rows)
        sampled = rows.rollout_logprobs if self.task.compares_logprobs else None
        return of_kind(PreferenceBatch, rows, margins=pairs.gaps, rollout_logprobs=sampled)

    def pair_metrics(self, pairs: Pairs) -> dict[str, float]:
        """Number of pairs, and how the prompts were used."""
        with_any = (pairs.chosen // self.config.group_size).unique().numel()
        metrics = {
            "pairs/count": float(len(pairs.gaps)),
            "pairs/ties": float(pairs.num_ties),
            "pairs/prompts_without_any": 1 - with_any / self.config.prompts_per_step,
        }
        return metrics | ({"pairs/reward_gap": pairs.gaps.double().mean().item()} if len(pairs.gaps) else {})

    def state(self) -> dict[str, Any]:
        return super().state() | {"reference_step": self.reference_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.reference_step = state["reference_step"]
        if self.reference_step:
            assert self.reference is not None  # it has been renewed
            self.reference.restore(self.reference_step)
        super().load_state(state)

    def _renew_reference(self, finished: int, clock: Clock) -> None:
        """Before a step and not after one: steps that are left out do not run."""
        if self.config.reference_every and finished - self.reference_step >= self.config.reference_every:
            assert self.reference is not None  # `OnlineDPOConfig` refuses reference_every without one
            with clock.phase("reference"):
                self.reference.renew(finished)
            self.reference_step = finished


COLUMNS = (
    *REWARDED,
    Column("KL", "pairs/ref_kl", ".4f"),
    Column("pref accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
)


@dataclass(kw_only=True, slots=True)
class TrainOnlineDPO(OnlineRun):
    """DPO on pairs of the policy's own samples (conf/online_dpo/online_dpo.yaml)."""

    algorithm: OnlineDPOConfig = field(default_factory=OnlineDPOConfig)

    def traits(self) -> Traits:
        return self.actor_traits(unit=2, has_reference=self.algorithm.needs_reference)


def build(job: OnlineJob[TrainOnlineDPO]) -> Built:
    """The reference is the model that the run starts from, or follows."""
    settings = job.config.algorithm
    task = job.task(with_reference=settings.needs_reference, num_prompts=settings.prompts_per_step)
    job.ready()
    reference = None if task.reference is None else job.moving_reference(task)
    rollout_source = job.rollout_source(task, group_size=settings.group_size)
    return Built(algorithm=OnlineDPO(settings, job.policy, task, reference, rollout_source), model=job.policy.model)


RECIPE = Recipe(name="online_dpo", config=TrainOnlineDPO, build=build, columns=COLUMNS, presets_of=("dpo",))
