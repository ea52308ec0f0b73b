"""A teacher's pass over supervised examples, for `distillation.py`: no training, one step is one file of its log-probs.

The loop brings resuming, signals and the end of a job's time: the files that are there are the steps that are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aligner.algorithms.loop import Clock, StepResult
from aligner.algorithms.writing import FilesAlone
from aligner.data.collate import supervised_batch
from aligner.data.distillation import distilled
from aligner.data.supervised import SupervisedExample
from aligner.data.teacher import DistilledExample, Manifest
from aligner.errors import ConfigError
from aligner.types import LabeledBatch


@dataclass(kw_only=True, slots=True)
class TeacherPassConfig:
    """Settings of a teacher's pass."""

    top_k: int = 100  # of its likeliest tokens, those that are written
    shard_size: int = 1024  # examples per file: what a job that is killed computes again, at most
    batch_size: int = 64  # examples that are in memory together, over all replicas

    def __post_init__(self) -> None:
        for name in ("top_k", "shard_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be at least 1")


class Teacher(Protocol):
    """A frozen language model."""

    def topk(self, batch: LabeledBatch, k: int, *, below: int) -> tuple[Tensor, Tensor]:
        """As `aligner.models.policy.MegatronPolicy.topk`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSet:
    """One data set: its examples, what its files are, and how one is written (every rank calls it)."""

    examples: Sequence[SupervisedExample]
    manifest: Manifest
    write: Callable[[int, Sequence[DistilledExample]], None]  # shard, its examples


class TeacherPass(FilesAlone):
    """The pass over its parts. Every rank constructs one. `below`: one more than the largest id of the tokenizer."""

    def __init__(self, config: TeacherPassConfig, teacher: Teacher, sets: Sequence[TeacherSet], *, pad_id: int, below: int) -> None:
        self.config = config
        self.teacher = teacher
        self.sets = sets
        self.pad_id = pad_id
        self.below = below

    @property
    def num_steps(self) -> int:
        """Files to write."""
        return sum(one.manifest.num_shards for one in self.sets)

    def step(self, step: int, clock: Clock) -> StepResult:
        one, shard = self._find(step)
        first = shard * one.manifest.shard_size
        rows = one.examples[first : first + one.manifest.shard_size]
        found: list[DistilledExample] = []
        with clock.phase("logprobs"):
            for start in range(0, len(rows), self.config.batch_size):
                found += self._pass(rows[start : start + self.config.batch_size])
        with clock.phase("write"):
            one.write(shard, found)
        num_tokens = sum(len(example.tokens) for example in found)
        mass = sum(example.teacher_logprobs.double().exp().sum().item() for example in found)
        return StepResult(
            metrics={
                "teacher/mass": mass / sum(len(example.teacher_tokens) for example in found),  # of the K tokens together
                "data/tokens_per_second": num_tokens / clock.seconds["time/logprobs"],
            }
        )

    def _find(self, step: int) -> tuple[TeacherSet, int]:
        shard = step - 1
        for one in self.sets:
            if shard < one.manifest.num_shards:
                return one, shard
            shard -= one.manifest.num_shards
        raise ValueError(f"step {step} is beyond the {self.num_steps} files")

    def _pass(self, rows: Sequence[SupervisedExample]) -> list[DistilledExample]:
        batch = supervised_batch(rows, self.pad_id)
        return distilled(rows, batch.loss_mask, *self.teacher.topk(batch, self.config.top_k, below=self.below))
