"""`metrics.jsonl`: one JSON object per step, `{"step": 12, "time": 1700000000.0, "reward/mean": 0.5, ...}`, steps strictly rising.

JSON has no NaN and no infinities. null would lose which one it was, so they are written as the strings "NaN", "Infinity" and
"-Infinity", which `float()` of most languages reads and `read_metrics` turns back into numbers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aligner.errors import DataError
from aligner.files import publish

_RESERVED = ("step", "time")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One line: `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


def json_number(value: float) -> float | str:
    """A number as JSON can hold it."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _encode(record: StepMetrics) -> bytes:
    line = {"step": record.step, "time": record.time} | {name: json_number(value) for name, value in record.values.items()}
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _decode(line: bytes, source: str) -> StepMetrics:
    try:
        raw: dict[str, Any] = json.loads(line)
        values = {name: float(value) for name, value in raw.items() if name not in _RESERVED}
        return StepMetrics(step=int(raw["step"]), time=float(raw["time"]), values=values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{source}: not a line of metrics ({error}): {line[:80]!r}") from error


def read_metrics(path: Path) -> list[StepMetrics]:
    """All complete lines, without an unterminated last one. Raises DataError, with file and line, for anything that is not metrics."""
    complete = path.read_bytes().split(b"\n")[:-1]
    return [_decode(line, f"{path}:{number}") for number, line in enumerate(complete, start=1)]


class MetricsTail:
    """Reads a growing file by what is new; `records` are all complete lines so far. The last line is read again each time, because a step
    that is logged again is merged into it; a file that a resumed run has replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self.records: list[StepMetrics] = []
        self._path = path
        self._file, self._start = 0, 0  # inode; the byte at which the last complete line begins

    def follow(self) -> None:
        """Read on. Raises DataError for a line that is not metrics, OSError; a missing file has no lines."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self.records, self._file = [], 0
            return
        with file:
            if os.fstat(file.fileno()).st_ino != self._file or not self._continues(file):
                self._file, self._start, self.records = os.fstat(file.fileno()).st_ino, 0, []
            file.seek(self._start)
            lines = file.read().split(b"\n")[:-1]
            read = [_decode(line, f"{self._path}: byte {self._start} or later") for line in lines]
            self.records = self.records[:-1] + read if read else self.records
            self._start += sum(len(line) + 1 for line in lines[:-1])

    def _continues(self, file: BinaryIO) -> bool:
        """Whether the last line that was read is where it was: a new file may have the number of one before."""
        file.seek(self._start)
        line = file.readline()
        return not self.records or (
            line.endswith(b"\n") and _decode(line, f"{self._path}: byte {self._start}").step == self.records[-1].step
        )


class MetricsFile:
    """Appends steps to a file; a step that is logged again right away is merged into its line. A resumed run gets a new file without the
    lines of later steps."""

    def __init__(self, path: Path, *, resumed_step: int = 0) -> None:
        records = read_metrics(path) if path.exists() else []
        kept = [record for record in records if record.step <= resumed_step]
        publish(path, lambda new: new.write_bytes(b"".join(map(_encode, kept))))
        self.num_cut = len(records) - len(kept)
        self.missing = sorted(set(range(1, resumed_step + 1)) - {record.step for record in kept})  # torn, or lost to a full disk
        self._last = kept[-1] if kept else None
        self._file = path.open("r+b", buffering=0)  # nothing may be left to a later write: it would come at another place
        self._line_start = path.stat().st_size - (len(_encode(self._last)) if self._last else 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of `step`. Raises ValueError if `step` lies before the last one; OSError if the disk is full: the line is then
        missing, and the file whole."""
        for name in _RESERVED:
            if name in metrics:
                raise ValueError(f"a metric is called {name!r}, which metrics.jsonl uses itself; use area/quantity")
        values = {name: float(value) for name, value in metrics.items()}
        last = self._last
        if last is not None and step < last.step:
            raise ValueError(f"metrics of step {step} after those of step {last.step}; allowed: the same or a later step")
        start = self._file.seek(0, os.SEEK_END)
        if last is not None and step == last.step:
            values, start = last.values | values, self._line_start
        record = StepMetrics(step=step, time=time.time(), values=values)
        self._put(_encode(record), start)
        self._last, self._line_start = record, start

    def _put(self, data: bytes, start: int) -> None:
        """Write `data` at byte `start`, the file's new end; truncate there on failure."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], start + written)
            os.ftruncate(self._file.fileno(), start + len(data))
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise

    def close(self) -> None:
        self._file.close()
