"""Training a reward model on numbers: one for each attribute of a response (HelpSteer, 2311.09528; SteerLM, 2310.05344).

Against `reward_model.py`: a response is judged by itself and not against another one, by several attributes at once, some of which may be
missing. The same model predicts the labels that SteerLM conditions on, and, with `reward.attribute_weights`, gives rewards to PPO and GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligner.algorithms.reward_model import ScoreModel, build_training
from aligner.data.config import RegressionDataConfig
from aligner.data.judged import LabelledExample, labelled_batch, load_regression
from aligner.data.labelled import MISSING
from aligner.errors import ConfigError
from aligner.loop.epochs import BatchConfig, EpochTraining
from aligner.loop.loop import Built
from aligner.losses.aggregation import require
from aligner.losses.reward import regression_loss
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.planner.workload import Head
from aligner.protocols import Loss
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, Traits, check_pooling, reading
from aligner.types import LabeledBatch

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class RegressionConfig(BatchConfig):
    """Settings of regression on attributes."""

    batch_size: int = 128  # examples per update
    validation_batch_size: int = 128  # examples per forward batch of a validation
    pooling: Pooling = Pooling.last  # what of a sequence is scored: its last token, or the mean over its tokens

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        if self.pooling is Pooling.tokens:
            raise ConfigError("algorithm.pooling=tokens: labels are of whole responses; allowed: last, mean")


class RegressionTraining(EpochTraining[RegressionConfig, LabelledExample, LabeledBatch, ScoreModel]):
    """The algorithm over its parts. Every rank constructs one. `attributes` names the K labels of every example."""

    def __init__(self, config: RegressionConfig, model: ScoreModel, *, attributes: Sequence[str], **data: Any) -> None:
        super().__init__(config, model, **data)
        self.attributes = attributes

    @property
    def loss(self) -> Loss[LabeledBatch]:
        return partial(regression_loss, attributes=self.attributes)

    def collate(self, examples: Sequence[LabelledExample]) -> LabeledBatch:
        return labelled_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Mean squared error over all labels; of each attribute, that and the correlation of scores and labels (Pearson's)."""
        if not self.validation:
            return {}
        batches = list(self.held_out())
        scores = torch.cat([self.model.scores(batch) for batch in batches]).double()
        labels = torch.cat([require(batch.labels, "LabeledBatch.labels") for batch in batches]).double()
        there = labels != MISSING
        found = {"validation/mse": (scores - labels)[there].square().mean().item()}
        for column, name in enumerate(self.attributes):
            own = there[:, column]
            found[f"validation/mse_{name}"] = (scores - labels)[own, column].square().mean().item()  # NaN where nobody judged it
            found[f"validation/correlation_{name}"] = correlation(scores[own, column], labels[own, column])
        return found


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's of two vectors of one length; NaN if one of them is constant, or there are fewer than two numbers."""
    if len(one) < 2:
        return math.nan
    first, second = one - one.mean(), other - other.mean()
    scale = (first.square().sum() * second.square().sum()).sqrt().item()
    return (first * second).sum().item() / scale if scale else math.nan


COLUMNS = (
    Column("loss", "reward/loss", ".4f", Goal.lowest),
    Column("error", "reward/absolute_error", ".3f", Goal.lowest),
    Column("val mse", "validation/mse", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainRegressionRewardModel(TrainerRun):
    """Training a reward model on attributes with numbers (conf/regression_reward_model/regression_reward_model.yaml)."""

    data: RegressionDataConfig = field(default_factory=RegressionDataConfig)
    algorithm: RegressionConfig = field(default_factory=RegressionConfig)
    read = reading(load_regression)

    def __post_init__(self) -> None:
        TrainerRun.__post_init__(self)
        check_pooling(self.algorithm.pooling, self.model)

    def reports(self) -> Sequence[str]:
        return ["validation/mse", *(f"validation/{kind}_{name}" for name in self.data.attributes for kind in ("mse", "correlation"))]

    def traits(self) -> Traits:
        return self.batch_traits(head=Head.scalar)


def build(job: TrainerJob[TrainRegressionRewardModel]) -> Built:
    attributes = job.config.data.attributes
    head = ScalarHead(outputs=tuple(attributes), pooling=job.config.algorithm.pooling)
    return build_training(job, RegressionTraining, load_regression, head, attributes=attributes)


RECIPE = Recipe(name="regression_reward_model", config=TrainRegressionRewardModel, build=build, columns=COLUMNS)
