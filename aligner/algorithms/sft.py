"""Supervised fine-tuning: cross-entropy of the response tokens (Ouyang et al. 2022, 2203.02155, step 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.algorithms.epochs import BatchConfig, EpochTraining
from aligner.data.collate import supervised_batch
from aligner.data.supervised import SupervisedExample
from aligner.losses.sft import sft_loss
from aligner.protocols import Loss, Policy
from aligner.types import LabeledBatch

REPORTS = ("validation/loss",)  # of a validation


@dataclass(kw_only=True, slots=True)
class SFTConfig(BatchConfig):
    """Settings of supervised fine-tuning."""

    batch_size: int = 128
    validation_batch_size: int = 128


class SFT(EpochTraining[SupervisedExample, Policy]):
    """The algorithm over its parts. Every rank constructs one."""

    @property
    def loss(self) -> Loss:
        return sft_loss

    def collate(self, examples: Sequence[SupervisedExample]) -> LabeledBatch:
        return supervised_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Mean token cross-entropy on the validation examples."""
        total, count = 0.0, 0
        for batch in self.held_out():
            total -= self.model.logprobs(batch).double().sum().item()
            count += int(batch.loss_mask.sum())
        return {"validation/loss": total / count} if count else {}
