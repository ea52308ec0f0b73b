"""A data set that a job writes part by part, so that a killed job resumes after the last complete part.

<directory>/manifest.json        its inputs
<directory>/part_000000.jsonl    the records of `part_size` items (or with another suffix); a file of that name is complete
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.errors import DataError
from aligner.files import publish

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """`made_of`: digests and settings by name; parts made of different inputs are refused."""

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
