"""Jobs that write a data set instead of training: one step is one part of it.

The training loop handles resuming, signals and time limits: the existing parts are the finished steps.

<directory>/manifest.json        its inputs
<directory>/part_000000.jsonl    the records of `part_size` items (or with another suffix); a file of that name is complete
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.errors import DataError
from aligner.files import publish
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


MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The files of a data set. `made_of`: digests and settings by name; parts made of different inputs are refused."""

    directory: Path
    made_of: Mapping[str, str]
    num_items: int
    part_size: int
    suffix: str = "jsonl"

    @property
    def num_parts(self) -> int:
        return math.ceil(self.num_items / self.part_size)

    def begin(self) -> None:
        """Write the manifest, or check the existing one. Raises DataError if the parts were made of something else."""
        path = self.directory / MANIFEST
        own = {**self.made_of, "num_items": self.num_items, "part_size": self.part_size}
        if not path.exists():
            publish(path, lambda new: new.write_text(json.dumps(own, indent=2) + "\n"))
            return
        found = json.loads(path.read_text())
        if other := [name for name in own if name not in found or found[name] != own[name]]:
            raise DataError(
                f"{self.directory} holds parts of another job: {', '.join(other)} differ; allowed: the same settings and files, another "
                "run.directory, or removing it"
            )

    def num_complete(self) -> int:
        """The number of parts before the first missing one."""
        return next((part for part in range(self.num_parts) if not self.path(part).exists()), self.num_parts)

    def write(self, part: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a part, atomically."""
        text = "".join(_lines(records))
        publish(self.path(part), lambda new: new.write_text(text))

    def join(self, path: Path, select: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None = None) -> None:
        """Write all parts as one file; `select` replaces every record by its result."""

        def write(new: Path) -> None:
            with new.open("w") as stream:
                for part in range(self.num_parts):
                    if select is None:
                        stream.write(self.path(part).read_text())
                    else:
                        stream.writelines(_lines([one for record in self.read(part) for one in select(record)]))

        publish(path, write)

    def read(self, part: int) -> list[dict[str, Any]]:
        with self.path(part).open() as stream:
            return [json.loads(line) for line in stream]

    def path(self, part: int) -> Path:
        """The path of a complete part, whether it exists or not."""
        return self.directory / f"part_{part:06d}.{self.suffix}"


def _lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
