"""Jobs that write a data set instead of training: one step is one part of it.

The training loop handles resuming, signals and time limits: the existing parts are the finished steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.loop.epochs import Stateless
from aligner.loop.loop import Clock, StepResult
from aligner.parallel.collectives import from_rank_0
from aligner.reporting.formats import Column

Record = Mapping[str, Any]


# What the progress view shows of a job that writes records.
COLUMNS = (
    Column("records", "data/records", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("truncated", "rollout/truncated_fraction", "percent"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


class FilesAlone(Stateless):
    """An algorithm that trains nothing: the files that it has written are its state."""

    def validate(self) -> Mapping[str, float]:
        """There is nothing to validate."""
        return {}


@dataclass(frozen=True, eq=False)
class Writing(FilesAlone):
    """`aligner.loop.loop.Algorithm` that makes records of items and writes them. Every rank constructs one.

    `make(number, items)` gives the records of the part with this number, and metrics; `write(number, records)` keeps them. Collective.
    """

    items: Sequence[Any]
    part_size: int
    make: Callable[[int, Sequence[Any]], tuple[list[Record], dict[str, float]]]
    write: Callable[[int, Sequence[Record]], None]

    @property
    def num_steps(self) -> int:
        """Parts to write."""
        return -(-len(self.items) // self.part_size)

    def step(self, step: int, clock: Clock) -> StepResult:
        first = (step - 1) * self.part_size
        with clock.phase("make"):
            records, metrics = self.make(step - 1, self.items[first : first + self.part_size])
        with clock.phase("write"):
            self.write(step - 1, records)
        return StepResult(metrics={"data/records": float(len(records)), **metrics})


def digest_of(what: object) -> str:
    """Changes with the data that a data set is made of."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


class WrittenFiles:
    """`aligner.loop.loop.Checkpointer` of a job whose files are its only state. Every step writes one. `count()`,
    called on rank 0, gives the number of files before the first missing one."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def load(self) -> tuple[int, dict[str, Any]]:
        """(steps that are done, nothing)."""
        return from_rank_0(self._count), {}

    def save(self, step: int, state: dict[str, Any], validation: Mapping[str, float]) -> None:
        """Every step has written its file."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None: ...

    def settle(self) -> int:
        """Steps that are done."""
        return from_rank_0(self._count)

    def rescue(self, step: int, state: dict[str, Any]) -> None: ...

    def version(self) -> int:
        """No weights change."""
        return 0
