"""Training a reward model on numbers: one for each attribute of a response (HelpSteer, 2311.09528; SteerLM, 2310.05344).

Against `reward_model.py`: a response is judged by itself and not against another one, by several attributes at once, some of which may be
missing. The same model predicts the labels that SteerLM conditions on, and, with `reward.attribute_weights`, gives rewards to PPO and GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.algorithms.epochs import BatchConfig, EpochTraining
from aligner.data.labels import MISSING
from aligner.data.regression import LabelledExample, labelled_batch
from aligner.errors import ConfigError
from aligner.losses.reward import regression_loss
from aligner.models.scalar_head import Pooling
from aligner.protocols import Loss, Trainable
from aligner.types import LabeledBatch


@dataclass(kw_only=True, slots=True)
class RegressionConfig(BatchConfig):
    """Settings of regression on attributes."""

    batch_size: int = 128
    validation_batch_size: int = 128
    pooling: Pooling = Pooling.last

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        if self.pooling is Pooling.tokens:
            raise ConfigError("algorithm.pooling=tokens: labels are of whole responses; allowed: last, mean")


def reports(attributes: Sequence[str]) -> list[str]:
    """The names of the metrics that a validation gives."""
    return ["validation/mse", *(f"validation/{kind}_{name}" for name in attributes for kind in ("mse", "correlation"))]


class AttributeModel(Trainable, Protocol):
    """A trainable model with several scores per sequence."""

    def scores(self, batch: LabeledBatch) -> Tensor:
        """Float32 [B, K]."""


class RegressionTraining(EpochTraining[LabelledExample, AttributeModel]):
    """The algorithm over its parts. Every rank constructs one. `attributes` names the K labels of every example."""

    def __init__(self, config: RegressionConfig, model: AttributeModel, *, attributes: Sequence[str], **data: Any) -> None:
        super().__init__(config, model, **data)
        self.attributes = attributes

    @property
    def loss(self) -> Loss:
        return partial(regression_loss, attributes=self.attributes)

    def collate(self, examples: Sequence[LabelledExample]) -> LabeledBatch:
        return labelled_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Mean squared error over all labels; of each attribute, that and the correlation of scores and labels (Pearson's)."""
        if not self.validation:
            return {}
        batches = list(self.held_out())
        scores = torch.cat([self.model.scores(batch) for batch in batches]).double()
        labels = torch.cat([batch.labels for batch in batches]).double()
        there = labels != MISSING
        found = {"validation/mse": (scores - labels)[there].square().mean().item()}
        for column, name in enumerate(self.attributes):
            own = there[:, column]
            found[f"validation/mse_{name}"] = (scores - labels)[own, column].square().mean().item()  # NaN where nobody judged it
            found[f"validation/correlation_{name}"] = correlation(scores[own, column], labels[own, column])
        return found


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's of two vectors of one length; NaN where one of them is constant, or there are fewer than two numbers."""
    if len(one) < 2:
        return math.nan
    first, second = one - one.mean(), other - other.mean()
    scale = (first.square().sum() * second.square().sum()).sqrt().item()
    return (first * second).sum().item() / scale if scale else math.nan
