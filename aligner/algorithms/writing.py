"""Jobs that write a data set instead of training: one step is one part of it.

The loop brings resuming, signals and the end of a job's time: the parts that are there are the steps that are finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aligner.algorithms.epochs import Stateless
from aligner.algorithms.loop import Clock, StepResult
from aligner.data.reward_config import STEERLM_ATTRIBUTES
from aligner.errors import ConfigError

Item = TypeVar("Item")
Record = Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """Settings of generation."""

    num_samples: int = 1  # responses per prompt
    grouped: bool = False  # one record per prompt with all of its responses, as SteerLM 2 has them; else one per response
    part_size: int = 256  # prompts per file: what a job that is killed does again, at most

    def __post_init__(self) -> None:
        for name in ("num_samples", "part_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be at least 1")
        if self.grouped and self.num_samples < 2:
            raise ConfigError(f"algorithm.num_samples={self.num_samples}: responses are compared with algorithm.grouped=true; at least 2")


@dataclass(kw_only=True, slots=True)
class AnnotateConfig:
    """Settings of annotation. Scores are rounded to whole numbers from `lowest` to `highest`, as labels are."""

    attributes: list[str] = field(default_factory=lambda: list(STEERLM_ATTRIBUTES))  # what the model's outputs are, in their order
    lowest: int = 0
    highest: int = 4
    part_size: int = 1024  # records per file: what a job that is killed does again, at most
    batch_size: int = 64  # rows that are scored together
    served_by: str = ""  # run directory of a reward server, which scores in place of model.path

    def __post_init__(self) -> None:
        for name in ("part_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be at least 1")
        if self.lowest >= self.highest:
            raise ConfigError(f"algorithm.lowest={self.lowest}: must be below highest={self.highest}")
        if not self.attributes or len(set(self.attributes)) < len(self.attributes):
            raise ConfigError(f"algorithm.attributes={self.attributes}: must be names, each once")

    def label(self, scores: Sequence[float]) -> str:
        """`quality:4,toxicity:0`. Halves go up; raises ValueError for another number of scores."""
        levels = [min(max(math.floor(score + 0.5), self.lowest), self.highest) for score in scores]
        return ",".join(f"{name}:{level}" for name, level in zip(self.attributes, levels, strict=True))


class FilesAlone(Stateless):
    """An algorithm that trains nothing: the files that it has written are its state."""

    def validate(self) -> Mapping[str, float]:
        """There is nothing to validate."""
        return {}


class Writing(FilesAlone):
    """`aligner.algorithms.loop.Algorithm` that makes records of items and writes them. Every rank constructs one.

    `make(number, items)` gives the records of the part with this number, and metrics; `write(number, records)` keeps them. Collective.
    """

    def __init__(
        self,
        items: Sequence[Item],
        part_size: int,
        *,
        make: Callable[[int, Sequence[Item]], tuple[list[Record], dict[str, float]]],
        write: Callable[[int, Sequence[Record]], None],
    ) -> None:
        self.items = items
        self.part_size = part_size
        self._make = make
        self._write = write

    @property
    def num_steps(self) -> int:
        """Parts to write."""
        return -(-len(self.items) // self.part_size)

    def step(self, step: int, clock: Clock) -> StepResult:
        first = (step - 1) * self.part_size
        with clock.phase("make"):
            records, metrics = self._make(step - 1, self.items[first : first + self.part_size])
        with clock.phase("write"):
            self._write(step - 1, records)
        return StepResult(metrics={"data/records": float(len(records)), **metrics})
