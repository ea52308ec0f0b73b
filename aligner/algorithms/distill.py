"""Knowledge distillation (Hinton et al. 2015, 1503.02531) from stored log-probs of a teacher's K likeliest tokens at each position.

One step: a batch of examples with the teacher's log-probs; one update of the policy (the student) on

    divergence(teacher, student) + ce_coef * (-log pi)        per trained token

of both distributions renormalised over the K tokens, or with all other tokens as one more outcome.

Against `sft.py`: each position teaches how likely all of the teacher's K tokens were, not which one is in the data. Against
`online_distill.py`: the text is the data's, not the student's own, and the teacher need not be there, so it may be of any size and
layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aligner.data.config import DistillationDataConfig
from aligner.data.distillation import DistilledExample, check_logprobs, distillation_batch, load_distillation
from aligner.errors import ConfigError, check_numbers
from aligner.loop.epochs import EpochTraining
from aligner.loop.loop import Built
from aligner.losses.aggregation import require
from aligner.losses.distillation import Divergence, distillation_loss
from aligner.losses.sft import sft_loss
from aligner.protocols import Loss, Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, reading
from aligner.telemetry.metrics import merge, values
from aligner.types import DistillationBatch, LabeledBatch, LossOutput, TokenOutputs
from aligner.types.batches import of_kind

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class DivergenceConfig:
    """Settings of `distillation_terms` under `algorithm.`; an algorithm's config has them by inheritance."""

    divergence: Divergence = Divergence.forward_kl  # forward_kl: KL(teacher || student); backward_kl: KL(student || teacher); jsd: between
    teacher_weight: float = 0.5  # of divergence=jsd: the teacher's part in the mixture that both are compared with
    temperature: float = 1.0  # divides the log-probs of both before they are compared; above 1 the less likely tokens count for more
    tail_bucket: bool = False  # compare the probability of all other tokens too; else both are renormalised over the K
    ce_coef: float = 0.0  # of the negative log-likelihood of the tokens that are there

    def __post_init__(self) -> None:
        if not 0 < self.teacher_weight < 1:
            raise ConfigError(f"algorithm.teacher_weight={self.teacher_weight}: must be between 0 and 1")
        check_numbers(self, "algorithm", above_0=("temperature",), not_negative=("ce_coef",))

    def settings(self) -> dict[str, Any]:
        """The arguments of `distillation_terms` besides a batch and the model's outputs."""
        return {
            "divergence": self.divergence,
            "teacher_weight": self.teacher_weight,
            "temperature": self.temperature,
            "tail_bucket": self.tail_bucket,
            "ce_coef": self.ce_coef,
        }


@dataclass(kw_only=True, slots=True)
class DistillationConfig(DivergenceConfig):
    """Settings of distillation."""

    reports = ("validation/loss", "validation/agreement", "validation/nll")  # of a validation
    batch_size: int = 128  # examples per update
    validation_batch_size: int = 128  # examples per forward batch of a validation

    def __post_init__(self) -> None:
        DivergenceConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("batch_size", "validation_batch_size"))


class Student(Policy, Protocol):
    """A policy that can be asked for a loss's inputs without training."""

    def named_logprobs(self, batch: DistillationBatch) -> TokenOutputs:
        """logprobs and topk_logprobs of the batch, on the CPU; no gradient."""


def distillation_terms(outputs: TokenOutputs, batch: DistillationBatch, *, ce_coef: float, **settings: Any) -> LossOutput:
    """Divergence and, times `ce_coef`, cross-entropy: sums over trained tokens; count: those tokens. `settings` of `distillation_loss`.

    Metrics: distillation/loss (the divergence, nats per token), distillation/agreement, distillation/nll.
    """
    student = require(outputs.topk_logprobs, "TokenOutputs.topk_logprobs")
    apart = distillation_loss(student, batch.teacher_logprobs, batch.loss_mask, **settings)
    text = sft_loss(outputs, of_kind(LabeledBatch, batch))
    total = apart.total + ce_coef * text.total if ce_coef else apart.total
    return LossOutput(total=total, count=apart.count, metrics={**apart.metrics, "distillation/nll": text.metrics["sft/loss"]})


class Distillation(EpochTraining[DistillationConfig, DistilledExample, DistillationBatch, Student]):
    @property
    def loss(self) -> Loss[DistillationBatch]:
        return partial(distillation_terms, **self.config.settings())

    def collate(self, examples: Sequence[DistilledExample]) -> DistillationBatch:
        return distillation_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Divergence, agreement and token cross-entropy on the validation examples."""
        parts = [self.loss(self.model.named_logprobs(batch), batch).metrics for batch in self.held_out()]
        return {name.replace("distillation/", "validation/"): value for name, value in values(merge(parts)).items()} if parts else {}


COLUMNS = (
    Column("loss", "distillation/loss", ".4f", Goal.lowest),
    Column("agreement", "distillation/agreement", "percent", Goal.highest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainDistillation(TrainerRun):
    """Distillation from a teacher's stored log-probs (conf/distill/distill.yaml)."""

    data: DistillationDataConfig = field(default_factory=DistillationDataConfig)
    algorithm: DistillationConfig = field(default_factory=DistillationConfig)
    read = reading(load_distillation)


def build(job: TrainerJob[TrainDistillation]) -> Built:
    settings = job.config.algorithm
    train, validation = job.load(load_distillation)
    if settings.tail_bucket:
        check_logprobs(train)
        check_logprobs(validation)
    policy = job.policy()
    return Built(algorithm=Distillation(settings, policy, train=train, validation=validation, **job.common), model=policy.model)


RECIPE = Recipe(name="distill", config=TrainDistillation, build=build, columns=COLUMNS)
