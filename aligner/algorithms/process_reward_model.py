"""Training a process reward model: every step of a response is good or bad (Lightman et al. 2023, 2305.20050; Math-Shepherd, 2312.08935).

Binary cross-entropy of sigma(score) at the last token of each judged step. Against `reward_model.py`: what is wrong in a response is found
where it happens. The score of a whole response, as the reward server gives it, is that of its last token: of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from aligner.algorithms import reward_model
from aligner.data.config import StepDataConfig
from aligner.data.judged import SteppedExample, load_steps, step_batch
from aligner.loop.epochs import BatchConfig, EpochTraining
from aligner.loop.loop import Built
from aligner.losses.aggregation import require
from aligner.losses.reward import step_loss
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.planner.workload import Head
from aligner.protocols import Loss, Trainable
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, Traits, reading
from aligner.telemetry.metrics import merge, values
from aligner.types import LossOutput, StepBatch, TokenOutputs

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class ProcessRewardModelConfig(BatchConfig):
    """Settings of process-reward-model training."""

    reports = ("validation/loss", "validation/accuracy", "validation/first_error_accuracy")  # of a validation


class StepModel(Trainable, Protocol):
    """A trainable model with one score per judged step."""

    def step_scores(self, batch: StepBatch) -> Tensor:
        """Float32 [B, S], at the tokens in loss_mask."""


def process_loss(outputs: TokenOutputs, batch: StepBatch) -> LossOutput:
    """`step_loss` of a batch. Raises ValueError if the scores are missing."""
    return step_loss(require(outputs.step_scores, "TokenOutputs.step_scores"), batch.step_labels, batch.loss_mask)


class ProcessRewardModelTraining(EpochTraining[ProcessRewardModelConfig, SteppedExample, StepBatch, StepModel]):
    @property
    def loss(self) -> Loss[StepBatch]:
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
    """Where the first bad step of each row [B] ends; the row's width if there is none."""
    width = batch.tokens.shape[1]
    return torch.where(bad & batch.loss_mask, torch.arange(width), width).amin(dim=1)


@dataclass(kw_only=True, slots=True)
class TrainProcessRewardModel(TrainerRun):
    """Training a reward model on the steps of responses (conf/process_reward_model/process_reward_model.yaml)."""

    data: StepDataConfig = field(default_factory=StepDataConfig)
    algorithm: ProcessRewardModelConfig = field(default_factory=ProcessRewardModelConfig)
    read = reading(load_steps)

    def traits(self) -> Traits:
        return self.batch_traits(head=Head.scalar)


def build(job: TrainerJob[TrainProcessRewardModel]) -> Built:
    head = ScalarHead(outputs=("step",), pooling=Pooling.tokens)
    return reward_model.build_training(job, ProcessRewardModelTraining, load_steps, head)


RECIPE = Recipe(name="process_reward_model", config=TrainProcessRewardModel, build=build, columns=reward_model.COLUMNS)
