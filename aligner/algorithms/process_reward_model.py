"""Training a process reward model: every step of a response is good or bad (Lightman et al. 2023, 2305.20050; Math-Shepherd, 2312.08935).

Binary cross-entropy of sigma(score) at the last token of each judged step. Against `reward_model.py`: what is wrong in a response is found
where it happens. The score of a whole response, as the reward server gives it, is that of its last token: of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aligner.algorithms.epochs import BatchConfig, EpochTraining
from aligner.data.steps import SteppedExample, step_batch
from aligner.losses.aggregation import require
from aligner.losses.reward import step_loss
from aligner.metrics import merge, values
from aligner.protocols import Loss, Trainable
from aligner.types import LossOutput, StepBatch, TokenOutputs

REPORTS = ("validation/loss", "validation/accuracy", "validation/first_error_accuracy")  # of a validation


@dataclass(kw_only=True, slots=True)
class ProcessRewardModelConfig(BatchConfig):
    """Settings of process-reward-model training."""


class StepModel(Trainable, Protocol):
    """A trainable model with one score per judged step."""

    def step_scores(self, batch: StepBatch) -> Tensor:
        """Float32 [B, S], at the tokens in loss_mask."""


def process_loss(outputs: TokenOutputs, batch: StepBatch) -> LossOutput:
    """`step_loss` of a batch. Raises ValueError where the scores are missing."""
    return step_loss(require(outputs.step_scores, "TokenOutputs.step_scores"), batch.step_labels, batch.loss_mask)


class ProcessRewardModelTraining(EpochTraining[SteppedExample, StepModel]):
    """The algorithm over its parts. Every rank constructs one."""

    @property
    def loss(self) -> Loss:
        return process_loss

    def collate(self, examples: Sequence[SteppedExample]) -> StepBatch:
        return step_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Loss and accuracy over steps, and the share of responses whose first bad step (or that there is none) is found."""
        if not self.validation:
            return {}
        parts, right = [], 0
        for batch in self.held_out():
            scores = self.model.step_scores(batch)
            parts.append(process_loss(TokenOutputs(step_scores=scores), batch).metrics)
            right += int((_first_error(scores <= 0, batch) == _first_error(batch.step_labels <= 0.5, batch)).sum())
        found = values(merge(parts))
        return {
            "validation/loss": found["reward/loss"],
            "validation/accuracy": found["reward/accuracy"],
            "validation/first_error_accuracy": right / len(self.validation),
        }


def _first_error(bad: Tensor, batch: StepBatch) -> Tensor:
    """Where the first bad step of each row [B] ends; the row's width where there is none."""
    width = batch.tokens.shape[1]
    return torch.where(bad & batch.loss_mask, torch.arange(width), width).amin(dim=1)
