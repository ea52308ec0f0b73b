"""The live view: one screen that is redrawn, with the course of the metrics, the phases of a step and the last sample rollouts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from aligner.reporting import formats
from aligner.reporting.pace import Pace, phases
from aligner.reporting.rollout_table import SampleRow, rich_table

_HISTORY_STEPS = 512
_TREND_WIDTH = 28
_SHARE_WIDTH = 18
_REFRESHES_PER_SECOND = 4
_PHASE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class LiveView:
    """Redrawn by a thread of its own, so that the clock runs while a step computes; what others print appears above it."""

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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
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
        self._live.console.print(Text(text))

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
