"""Training a reward model on pairs of responses: Bradley-Terry (Ouyang et al. 2022, 2203.02155, step 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from aligner.algorithms.epochs import BatchConfig, EpochTraining
from aligner.data.collate import preference_batch
from aligner.data.preferences import PreferencePair, require_margins
from aligner.errors import ConfigError
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.models.scalar_head import Pooling
from aligner.protocols import Loss, Trainable
from aligner.types import PreferenceBatch

REPORTS = ("validation/accuracy", "validation/margin")  # of a validation


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(BatchConfig):
    """Settings of reward-model training."""

    loss: BradleyTerry = BradleyTerry.standard
    pooling: Pooling = Pooling.last
    centre_coef: float = 0.0  # of (score_chosen + score_rejected)^2, which keeps scores near 0

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        if self.pooling is Pooling.tokens:
            raise ConfigError("algorithm.pooling=tokens: pairs are of whole responses; allowed: last, mean")
        if self.centre_coef < 0:
            raise ConfigError(f"algorithm.centre_coef={self.centre_coef}: must not be negative")


class ScoreModel(Trainable, Protocol):
    """A trainable model with one score per sequence."""

    def scores(self, batch: PreferenceBatch) -> Tensor:
        """Float32 [2P, K]."""


class RewardModelTraining(EpochTraining[PreferencePair, ScoreModel]):
    """The algorithm over its parts. Every rank constructs one.

    Raises DataError where the loss is of margins and no training pair has one.
    """

    def check(self) -> None:
        if self.config.loss is not BradleyTerry.standard:
            require_margins(self.train, f"algorithm.loss={self.config.loss.value}")

    @property
    def loss(self) -> Loss:
        return partial(bradley_terry_loss, variant=self.config.loss, centre_coef=self.config.centre_coef)

    def collate(self, examples: Sequence[PreferencePair]) -> PreferenceBatch:
        return preference_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Share of validation pairs whose chosen response scores higher, and the mean margin."""
        if not self.validation:
            return {}
        right, margin = 0, 0.0
        for batch in self.held_out():
            scores = self.model.scores(batch)[:, 0].double()
            difference = scores[0::2] - scores[1::2]
            right += int((difference > 0).sum())
            margin += difference.sum().item()
        return {"validation/accuracy": right / len(self.validation), "validation/margin": margin / len(self.validation)}
