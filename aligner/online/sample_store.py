"""The files of samples, part by part, of a run that trains in iterations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Generic, TypeVar

from aligner.files import publish
from aligner.parallel.collectives import from_rank_0

Item = TypeVar("Item")


class SampleFiles(Generic[Item]):
    """`aligner.algorithms.iterations.Kept` in a directory: <name>/<stem>_000000.json, each with its name once it is complete.

    `kind`: the dataclass of the items; its fields are numbers, texts, and tuples of them. Those that are None are not written.
    """

    def __init__(self, directory: Path, kind: type[Item], *, stem: str = "part") -> None:
        self._directory = directory
        self._kind = kind
        self._stem = stem

    def read(self, name: str, part: int) -> list[Item] | None:
        """None if there is no such file, or not one that was written here."""
        return from_rank_0(lambda: self._read(self._path(name, part)))

    def write(self, name: str, part: int, items: Sequence[Item]) -> None:
        """Atomically."""
        from_rank_0(lambda: self._write(self._path(name, part), items))

    def _path(self, name: str, part: int) -> Path:
        return self._directory / name / f"{self._stem}_{part:06d}.json"

    def _read(self, path: Path) -> list[Item] | None:
        try:
            records = json.loads(path.read_text())
            return [
                self._kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}) for one in records
            ]
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return None

    def _write(self, path: Path, items: Sequence[Item]) -> None:
        names = [field.name for field in fields(self._kind)]
        records = [{name: value for name in names if (value := getattr(item, name)) is not None} for item in items]
        publish(path, lambda new: new.write_text(json.dumps(records)))
