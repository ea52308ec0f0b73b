"""Training a reward model on pairs of responses: Bradley-Terry (Ouyang et al. 2022, 2203.02155, step 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from aligner.algorithms.loop import Clock, StepResult
from aligner.data.collate import preference_batch
from aligner.data.loader import EpochSampler
from aligner.data.preferences import PreferencePair, require_margins
from aligner.errors import ConfigError
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.metrics import values
from aligner.protocols import Trainable
from aligner.types import PreferenceBatch

REPORTS = ("validation/accuracy", "validation/margin")  # of a validation


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """Settings of reward-model training."""

    batch_size: int = 64  # pairs per update
    validation_batch_size: int = 64
    loss: BradleyTerry = BradleyTerry.standard
    centre_coef: float = 0.0  # of (score_chosen + score_rejected)^2, which keeps scores near 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.validation_batch_size < 1:
            raise ConfigError(
                f"algorithm.batch_size={self.batch_size}, validation_batch_size={self.validation_batch_size}: must be at least 1"
            )
        if self.centre_coef < 0:
            raise ConfigError(f"algorithm.centre_coef={self.centre_coef}: must not be negative")


class ScoreModel(Trainable, Protocol):
    """A trainable model with one score per sequence."""

    def scores(self, batch: PreferenceBatch) -> Tensor:
        """Float32 [2P, K]."""


class RewardModelTraining:
    """The algorithm over its parts. Every rank constructs one.

    Raises DataError where the loss is of margins and no training pair has one.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        model: ScoreModel,
        *,
        train: Sequence[PreferencePair],
        validation: Sequence[PreferencePair],
        pad_id: int,
        seed: int,
    ) -> None:
        if config.loss is not BradleyTerry.standard:
            require_margins(train, f"algorithm.loss={config.loss.value}")
        self.config = config
        self.model = model
        self.train = train
        self.validation = validation
        self.pad_id = pad_id
        self.order = EpochSampler(len(train), config.batch_size, seed)
        self.loss = partial(bradley_terry_loss, variant=config.loss, centre_coef=config.centre_coef)

    def step(self, step: int, clock: Clock) -> StepResult:
        batch = preference_batch([self.train[i] for i in self.order.indices(step - 1)], self.pad_id)
        with clock.phase("train"):
            metrics = values(self.model.train_step(batch, self.loss))
        metrics["data/tokens_per_second"] = int(batch.lengths.sum()) / clock.seconds["time/train"]
        return StepResult(metrics=metrics | {"data/epoch": self.order.epoch(step)})

    def validate(self) -> Mapping[str, float]:
        """Share of validation pairs whose chosen response scores higher, and the mean margin."""
        if not self.validation:
            return {}
        right, margin, size = 0, 0.0, self.config.validation_batch_size
        for start in range(0, len(self.validation), size):
            batch = preference_batch(self.validation[start : start + size], self.pad_id)
            scores = self.model.scores(batch)[:, 0].double()
            difference = scores[0::2] - scores[1::2]
            right += int((difference > 0).sum())
            margin += difference.sum().item()
        return {"validation/accuracy": right / len(self.validation), "validation/margin": margin / len(self.validation)}

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is no state besides the model and the step number."""
