"""Supervised fine-tuning: cross-entropy of the response tokens (Ouyang et al. 2022, 2203.02155, step 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.algorithms.loop import Clock, StepResult
from aligner.data.collate import supervised_batch
from aligner.data.loader import EpochSampler
from aligner.data.supervised import SupervisedExample
from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.metrics import values
from aligner.protocols import Policy

REPORTS = ("validation/loss",)  # of a validation


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    """Settings of supervised fine-tuning."""

    batch_size: int = 128  # examples per update
    validation_batch_size: int = 128

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.validation_batch_size < 1:
            raise ConfigError(
                f"algorithm.batch_size={self.batch_size}, validation_batch_size={self.validation_batch_size}: must be at least 1"
            )


class SFT:
    """The algorithm over its parts. Every rank constructs one."""

    def __init__(
        self,
        config: SFTConfig,
        policy: Policy,
        *,
        train: Sequence[SupervisedExample],
        validation: Sequence[SupervisedExample],
        pad_id: int,
        seed: int,
    ) -> None:
        self.config = config
        self.policy = policy
        self.train = train
        self.validation = validation
        self.pad_id = pad_id
        self.order = EpochSampler(len(train), config.batch_size, seed)

    def step(self, step: int, clock: Clock) -> StepResult:
        batch = supervised_batch([self.train[i] for i in self.order.indices(step - 1)], self.pad_id)
        with clock.phase("train"):
            metrics = values(self.policy.train_step(batch, sft_loss))
        metrics["data/tokens_per_second"] = int(batch.lengths.sum()) / clock.seconds["time/train"]
        return StepResult(metrics=metrics | {"data/epoch": self.order.epoch(step)})

    def validate(self) -> Mapping[str, float]:
        """Mean token cross-entropy on the validation examples."""
        if not self.validation:
            return {}
        total, count, size = 0.0, 0, self.config.validation_batch_size
        for start in range(0, len(self.validation), size):
            batch = supervised_batch(self.validation[start : start + size], self.pad_id)
            total -= self.policy.logprobs(batch).double().sum().item()
            count += int(batch.loss_mask.sum())
        return {"validation/loss": total / count}

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is no state besides the model and the step number."""
