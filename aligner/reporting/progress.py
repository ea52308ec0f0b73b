"""What a run shows while it runs: a live view on a terminal, one aligned line per step in a batch log.

Metrics named `time/<phase>` (seconds) are the phases of a step, `time/step` its whole; everything else shown is a `Column` of the caller's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from rich.console import Console

from aligner.reporting import formats
from aligner.reporting.config import LoggingConfig, Progress
from aligner.reporting.live import LiveView
from aligner.reporting.pace import Pace, phases
from aligner.reporting.rollout_table import SampleRow, plain_table

_MAX_PHASES = 4


class View(Protocol):
    """Where a reporter shows things."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """One line per step, flushed; columns keep the widest width they had, so that steps stay aligned.

    step   7/200  reward 0.531  kl 0.0123  1.2k tok/s  3.4 s (generate 1.9 s, train 1.2 s)  ETA 10m56s
    """

    def __init__(self, columns: Sequence[formats.Column], pace: Pace, max_cell_chars: int, stream: TextIO) -> None:
        self._columns = columns
        self._pace = pace
        self._max_cell_chars = max_cell_chars
        self._stream = stream
        self._widths: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.finish(step)
        total = str(self._pace.total_steps)
        parts = [f"step {step:>{len(total)}}/{total}", *self._figures(metrics)]
        parts.append(self._padded("step", formats.seconds(self._pace.last_seconds(metrics))))
        times = phases(metrics)
        longest = sorted(times, key=lambda name: -times[name])[:_MAX_PHASES]
        if longest:
            shown = [f"{name} {self._padded('time/' + name, formats.seconds(times[name]))}" for name in times if name in longest]
            parts.append(f"({', '.join(shown)})")
        self.note("  ".join([*parts, self._pace.eta()]).rstrip())

    def _figures(self, metrics: Mapping[str, float]) -> list[str]:
        """The columns that this step has; of those that only other steps have (validation) the empty place."""
        figures = []
        for column in self._columns:
            label = f"{column.label} " if column.label else ""
            if column.metric in metrics:
                figures.append(label + self._padded(column.metric, column.text(metrics[column.metric])))
            elif column.metric in self._widths:
                figures.append(" " * (len(label) + self._widths[column.metric]))
        return figures

    def _padded(self, key: str, text: str) -> str:
        self._widths[key] = max(self._widths.get(key, 0), len(text))
        return text.rjust(self._widths[key])

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.note(plain_table(step, rows, self._max_cell_chars))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class NoView:
    """Shows nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_view(
    config: LoggingConfig, *, columns: Sequence[formats.Column], title: str, total_steps: int, start_step: int, stream: TextIO
) -> View:
    """The view that fits the stream: `auto` is live where a person looks at a terminal that can move its cursor."""
    pace = Pace(total_steps=total_steps, start_step=start_step, clock=time.monotonic)
    interactive = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if config.progress is Progress.off:
        return NoView()
    if config.progress is Progress.live or (config.progress is Progress.auto and interactive):
        console = Console(file=stream, force_terminal=True if config.progress is Progress.live else None)
        return LiveView(columns, pace, config.max_cell_chars, console, title)
    return PlainView(columns, pace, config.max_cell_chars, stream)
