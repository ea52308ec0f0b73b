"""Progress display: a live view on a terminal (one screen, redrawn), one aligned line per step in a batch log.

Metrics named `time/<phase>` (seconds) are the phases of a step, `time/step` the total; every other shown metric is a `Column` of the
caller. `Pace` measures the speed of a run and estimates its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from aligner.reporting import formats
from aligner.reporting.config import LoggingConfig, Progress
from aligner.reporting.loggers import MetricLogger
from aligner.reporting.rollout_table import SampleRow, plain_table, rich_table
from aligner.telemetry.terminal import Guarded, clean, guard, plain

_HISTORY_STEPS = 512
_TREND_WIDTH = 28
_SHARE_WIDTH = 18
_REFRESHES_PER_SECOND = 4
_PHASE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class LiveView:
    """Redrawn by its own thread, so that the clock runs during a step; other output appears above it."""

    def __init__(self, columns: Sequence[formats.Column], pace: Pace, max_cell_chars: int, console: Console, title: str) -> None:
        self._columns = columns
        self._pace = pace
        self._max_cell_chars = max_cell_chars
        self._title = title
        self._lock = threading.Lock()  # the drawing thread reads what the training thread writes
        self._history: dict[str, deque[float]] = {}
        self._metrics: dict[str, float] = {}
        self._samples: RenderableType | None = None
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=False,
            vertical_overflow="crop",
        )
        self._live.start()
        guard()  # Rich shows other output above the view, but does not clean it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._pace.finish(step)
            self._metrics.update(metrics)
            for column in self._columns:
                if column.metric in metrics:
                    self._history.setdefault(column.metric, deque(maxlen=_HISTORY_STEPS)).append(metrics[column.metric])

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        with self._lock:
            self._samples = rich_table(step, rows, self._max_cell_chars)

    def note(self, text: str) -> None:
        self._live.console.print(Text(plain(text)))

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        self._live.stop()

    def _render(self) -> RenderableType:
        with self._lock:
            parts: list[RenderableType] = [Rule(Text(self._title, style="bold"), style="dim", align="left"), self._bar()]
            figures = Table.grid(padding=(0, 4), expand=False)
            figures.add_row(self._metrics_table(), self._phases_table())
            parts.append(Padding(figures, (1, 0, 0, 0)))
            if self._samples is not None:
                parts.append(Padding(self._samples, (1, 0, 0, 0)))
            return Group(*parts)

    def _bar(self) -> RenderableType:
        pace = self._pace
        line = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        share = pace.current_step / pace.total_steps if pace.total_steps else 1.0
        line.add_row(
            Text(f"step {pace.current_step}/{pace.total_steps}", style="bold"),
            Text(f"{share:4.0%}"),
            ProgressBar(total=max(pace.total_steps, 1), completed=pace.current_step),
            Text(f"{formats.seconds(pace.elapsed_seconds())}  {pace.eta()}".rstrip()),
        )
        return line

    def _metrics_table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True, min_width=9)
        table.add_column(no_wrap=True, min_width=_TREND_WIDTH, style="cyan")
        table.add_column(style="dim", no_wrap=True)
        for column in self._columns:
            history = list(self._history.get(column.metric, ()))
            if history:
                best = column.best(history)
                table.add_row(
                    column.label,
                    column.text(history[-1]),
                    formats.sparkline(history, _TREND_WIDTH),
                    f"best {column.text(best)}" if best is not None else "",
                )
        return table

    def _phases_table(self) -> RenderableType:
        """Each phase as a bar, of the sum of the phases (phases may overlap, so their sum can exceed the step)."""
        times = phases(self._metrics)
        whole = sum(times.values()) or 1.0
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for i, (name, value) in enumerate(times.items()):
            bar = "█" * round(_SHARE_WIDTH * value / whole) or "▏"
            table.add_row(name.replace("_", " "), formats.seconds(value), Text(bar, style=_PHASE_COLOURS[i % len(_PHASE_COLOURS)]))
        if times:
            table.add_row("step", formats.seconds(self._pace.last_seconds(self._metrics)), "")
        return table


_RECENT_STEPS = 20
_PHASE_PREFIX = "time/"
_WHOLE_STEP = ("step", "total")


def _phase_name(metric: str) -> str:
    return plain(metric.removeprefix(_PHASE_PREFIX).removesuffix("_seconds"))


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase: the metrics `time/<phase>` or `time/<phase>_seconds`, without the one of the whole step."""
    times = {_phase_name(name): value for name, value in metrics.items() if name.startswith(_PHASE_PREFIX)}
    return {name: value for name, value in times.items() if name not in _WHOLE_STEP}


def step_seconds(metrics: Mapping[str, float]) -> float | None:
    """A step's duration by the run itself (`time/step`), if reported."""
    for name, value in metrics.items():
        if name.startswith(_PHASE_PREFIX) and _phase_name(name) in _WHOLE_STEP:
            return value
    return None


class Pace:
    """Measures the time between the ends of steps, so that validation and checkpoints count."""

    def __init__(self, *, total_steps: int, start_step: int, clock: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self.current_step = start_step
        self._clock = clock
        self._started = clock()
        self._ends: deque[tuple[int, float]] = deque([(start_step, self._started)], maxlen=_RECENT_STEPS + 1)

    def finish(self, step: int) -> None:
        """`step` has ended now. The first one after a start holds one-time costs: the second one replaces it."""
        if step > self.current_step:
            self.current_step = step
            self._ends.append((step, self._clock()))

    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def remaining_seconds(self) -> float | None:
        """Remaining steps times the mean of the recent ones, less what the current one has taken; None before the first step ended."""
        ends = list(self._ends)
        if len(ends) < 2:
            return None
        recent = ends if len(ends) == 2 or ends[0][1] != self._started else ends[1:]
        mean = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        if self.current_step >= self.total_steps:
            return 0.0
        left = (self.total_steps - self.current_step) * mean - (self._clock() - ends[-1][1])
        return max(left, 0.0)

    def last_seconds(self, metrics: Mapping[str, float]) -> float:
        """How long the last step took: as reported, else by the clock."""
        own = step_seconds(metrics)
        if own is not None:
            return own
        return self._ends[-1][1] - self._ends[-2][1] if len(self._ends) > 1 else 0.0

    def eta(self) -> str:
        """`ETA 5m12s`, `done`, or nothing while unknown."""
        remaining = self.remaining_seconds()
        if remaining is None:
            return ""
        return "done" if self.current_step >= self.total_steps else f"ETA {formats.seconds(remaining)}"


_MAX_PHASES = 4


class View(MetricLogger, Protocol):
    """Where a reporter shows things."""

    def note(self, text: str) -> None: ...


@dataclass(eq=False)
class PlainView:
    """One line per step, flushed; columns keep the widest width they had, so that steps stay aligned.

    step   7/200  reward 0.531  kl 0.0123  1.2k tok/s  3.4 s (generate 1.9 s, train 1.2 s)  ETA 10m56s
    """

    columns: Sequence[formats.Column]
    pace: Pace
    max_cell_chars: int
    stream: TextIO
    _widths: dict[str, int] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.finish(step)
        total = str(self.pace.total_steps)
        parts = [f"step {step:>{len(total)}}/{total}", *self._figures(metrics)]
        parts.append(self._padded("step", formats.seconds(self.pace.last_seconds(metrics))))
        times = phases(metrics)
        longest = sorted(times, key=lambda name: -times[name])[:_MAX_PHASES]
        if longest:
            shown = [f"{name} {self._padded('time/' + name, formats.seconds(times[name]))}" for name in times if name in longest]
            parts.append(f"({', '.join(shown)})")
        self.note("  ".join([*parts, self.pace.eta()]).rstrip())

    def _figures(self, metrics: Mapping[str, float]) -> list[str]:
        """The columns of this step; blanks for those that only other steps have (validation)."""
        figures = []
        for column in self.columns:
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
        self.note(plain_table(step, rows, self.max_cell_chars))

    def note(self, text: str) -> None:
        print(clean(text), file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class NoView(View):
    """Shows nothing."""


def open_view(
    config: LoggingConfig, *, columns: Sequence[formats.Column], title: str, total_steps: int, start_step: int, stream: TextIO
) -> View:
    """The view that fits the stream: `auto` is live on a terminal that can move its cursor."""
    pace = Pace(total_steps=total_steps, start_step=start_step, clock=time.monotonic)
    interactive = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if config.progress is Progress.off:
        return NoView()
    if config.progress is Progress.live or (config.progress is Progress.auto and interactive):
        drawing = cast(TextIO, Guarded(stream, drawn=True))
        console = Console(file=drawing, force_terminal=True if config.progress is Progress.live else None)
        return LiveView(columns, pace, config.max_cell_chars, console, title)
    return PlainView(columns, pace, config.max_cell_chars, stream)
