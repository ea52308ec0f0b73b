"""SteerLM 2 (2406.08673): the policy Q(y|a,x) is brought towards the responses y that have the attributes a.

One step: a batch of prompts, each with n responses that were sampled from a proposal Q'; the log-probs of the current policy; one update on

    sum_i (w_i - b_i) * (-log Q(y_i|a,x)) / (mean response tokens),     w, b: `aligner.losses.sft`.

Against SteerLM 1 (SFT on conversations with labels): a response counts for as much as it has the attributes it was asked for, not as if it
had them. Against DPO (`dpo.py`): all n responses are weighed at once, by an attribute model's probabilities instead of an order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligner.data.collate import supervised_batch
from aligner.data.config import ProposalDataConfig
from aligner.data.proposals import OF_PROPOSAL, ProposedGroup, load_proposals
from aligner.errors import DataError
from aligner.loop.epochs import BatchConfig, EpochTraining
from aligner.loop.learnt import of_mask
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.sft import importance_weights, response_coefficients, steerlm_loss
from aligner.models.config import Architecture
from aligner.planner.workload import Phase
from aligner.protocols import Loss, Policy, Reference
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, Traits, check_layout, reading
from aligner.telemetry.metrics import values
from aligner.types import LabeledBatch

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


class Proposal(str, Enum):
    """Where log Q'(y|a,x) comes from."""

    records = "records"
    start = "start"  # the model that the run starts from, where it sampled the responses: it is asked at every step


@dataclass(kw_only=True, slots=True)
class SteerLM2Config(BatchConfig):
    """Settings of SteerLM 2."""

    reports = ("validation/kl",)  # of a validation
    batch_size: int = 16  # prompts, each with all of its responses
    validation_batch_size: int = 16
    proposal: Proposal = Proposal.records  # what gives the log-prob of a response under its sampler: the records, or the run's start model


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """A batch whose labels are the coefficients of `steerlm_loss`, and the policy's distance from its target."""

    batch: LabeledBatch
    aim: Tensor  # w, float64 [B]
    policy: Tensor  # b
    group_size: int

    @property
    def kl(self) -> Tensor:
        """KL(w || b) of each group, nats."""
        per_row = torch.where(self.aim > 0, self.aim * (self.aim.log() - self.policy.log()), 0.0)
        return per_row.view(-1, self.group_size).sum(dim=1)

    @property
    def effective(self) -> Tensor:
        """How many equal weights w stands for in each group, from 1 to n."""
        return 1 / self.aim.square().view(-1, self.group_size).sum(dim=1)


class SteerLM2(EpochTraining[SteerLM2Config, ProposedGroup, LabeledBatch, Policy]):
    """The algorithm over its parts, on every rank. Raises DataError without log Q' in the records or by a `reference`."""

    def __init__(self, config: SteerLM2Config, policy: Policy, reference: Reference | None, **data: Any) -> None:
        self.reference = reference
        super().__init__(config, policy, **data)

    def check(self) -> None:
        lacking = [group for group in (*self.train, *self.validation) if group.proposals is None] if self.reference is None else []
        if lacking:
            raise DataError(
                f"{lacking[0].rows[0].source}: the responses of {len(lacking)} records have no {OF_PROPOSAL!r}; "
                "allowed: algorithm.proposal=start, where model.path sampled them"
            )

    @property
    def loss(self) -> Loss[LabeledBatch]:
        return steerlm_loss

    def collate(self, examples: Sequence[ProposedGroup]) -> LabeledBatch:
        return supervised_batch([row for group in examples for row in group.rows], self.pad_id)

    def step(self, step: int, clock: Clock) -> StepResult:
        with clock.phase("logprobs"):
            found = self.weigh(self.examples_of(step))
        with clock.phase("train"):
            metrics = values(self.model.train_step(found.batch, self.loss))
        metrics["steerlm/kl"] = found.kl.mean().item()
        metrics["steerlm/effective_responses"] = found.effective.mean().item()
        metrics["data/tokens_per_second"] = int(found.batch.lengths.sum()) / (clock.seconds["time/logprobs"] + clock.seconds["time/train"])
        weighs = found.batch.loss_mask & (found.batch.labels != 0)
        return StepResult(metrics=metrics | of_mask(weighs) | self.order.metrics(step))

    def weigh(self, groups: Sequence[ProposedGroup]) -> Weighed:
        """The rows of these groups with their coefficients under the current policy."""
        size = len(groups[0].rows)
        batch = self.collate(groups)
        targets = _column([group.targets for group in groups])
        if self.reference is None:
            proposals = _column([group.proposals for group in groups])
        else:
            proposals = self.reference.logprobs(batch).double().sum(dim=1)
        aim = importance_weights(targets, proposals, group_size=size)
        policy = importance_weights(self.model.logprobs(batch).double().sum(dim=1), proposals, group_size=size)
        coefficients = response_coefficients(aim, policy, batch.loss_mask.sum(dim=1), group_size=size)
        return Weighed(batch=replace(batch, labels=coefficients[:, None]), aim=aim, policy=policy, group_size=size)

    def validate(self) -> Mapping[str, float]:
        """KL(w || b), the mean over the validation groups."""
        size = self.config.validation_batch_size
        parts = [self.weigh(self.validation[start : start + size]).kl for start in range(0, len(self.validation), size)]
        return {"validation/kl": torch.cat(parts).mean().item()} if parts else {}


def _column(groups: Sequence[Sequence[float] | None]) -> Tensor:
    return torch.tensor([number for group in groups for number in group or ()], dtype=torch.float64)


COLUMNS = (
    Column("KL", "steerlm/kl", ".4f", Goal.lowest),
    Column("val KL", "validation/kl", ".4f", Goal.lowest),
    Column("effective", "steerlm/effective_responses", ".2f"),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainSteerLM2(TrainerRun):
    """SteerLM 2 (conf/steerlm2/steerlm2.yaml)."""

    data: ProposalDataConfig = field(default_factory=ProposalDataConfig)
    algorithm: SteerLM2Config = field(default_factory=SteerLM2Config)
    read = reading(load_proposals)
    has_frozen_start = True

    def traits(self) -> Traits:
        return self.batch_traits(rows=self.algorithm.batch_size * (self.data.num_responses or 4), phases=(Phase.logprobs,))

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        check_layout(self.model, self.parallel, architecture, num_ranks)  # batches are of prompts, each with several responses


def build(job: TrainerJob[TrainSteerLM2]) -> Built:
    settings = job.config.algorithm
    train, validation = job.load(load_proposals)
    policy = job.policy()
    reference = job.reference(policy) if settings.proposal is Proposal.start else None
    return Built(algorithm=SteerLM2(settings, policy, reference, train=train, validation=validation, **job.common), model=policy.model)


RECIPE = Recipe(name="steerlm2", config=TrainSteerLM2, build=build, columns=COLUMNS)
