"""One object that a training loop reports to; it updates files, loggers and the terminal.

columns = (Column("reward", "reward/mean", ".3f", Goal.highest), Column("KL", "policy/kl", ".4f"), ...)
with Reporter(config, run_directory=run, columns=columns, total_steps=200, start_step=0, settings=resolved) as reporter:
    reporter.log(step, {"reward/mean": 0.5, "time/generate": 1.9, ...})
    reporter.table(step, rows)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from aligner.errors import describe_os_error
from aligner.reporting.config import LoggingConfig
from aligner.reporting.diagnosis import Watch, metrics_of
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import MetricsFile, read_metrics
from aligner.reporting.loggers import open_loggers
from aligner.reporting.progress import open_view
from aligner.reporting.rollout_table import SampleRow, write_rows
from aligner.telemetry.run_files import RunFiles

_SHOWN = 8  # steps that a message lists


class Reporter:
    """Rank 0's reporter. `start_step`: last step of the checkpoint resumed from, 0 for a new run. `lost`: a warning if an earlier start
    left metrics but no checkpoint. Raises ConfigError for a logger that cannot start, DataError for a damaged metrics.jsonl."""

    lost = ""

    def __init__(
        self,
        config: LoggingConfig,
        *,
        run_directory: RunFiles,
        columns: Sequence[Column],
        total_steps: int,
        start_step: int = 0,
        settings: Mapping[str, Any] | None = None,
        title: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self._config = config
        self._rollouts = run_directory.rollouts
        for directory in (run_directory.path, self._rollouts):
            directory.mkdir(parents=True, exist_ok=True)
        self._metrics_path = run_directory.metrics
        self._file = MetricsFile(run_directory.metrics, resumed_step=start_step)
        self._watch = Watch(RULES if config.diagnose else ())
        self._watch.follow(read_metrics(run_directory.metrics))
        self._warnings: list[str] = []
        self._loggers = open_loggers(
            config,
            directory=run_directory.path,
            run_id=run_directory.run_id() if config.wandb_project else "",
            tensorboard=run_directory.tensorboard,
            resumed_step=start_step,
            settings=settings or {},
            warn=self._warnings.append,
        )
        self._view = open_view(
            config,
            columns=columns,
            title=title or run_directory.path.name,
            total_steps=total_steps,
            start_step=start_step,
            stream=stream or sys.stdout,
        )
        cut, missing, name = self._file.num_cut, self._file.missing, run_directory.metrics.name
        if cut and not start_step:
            self.lost = f"warning: no checkpoint to resume from: {cut} steps of an earlier start are lost"
        if cut:
            self.note(self.lost or f"resumed at step {start_step}: {cut} later steps were cut from {name}")
        if missing:
            steps = ", ".join(map(str, missing[:_SHOWN])) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
            self.note(f"warning: {name} has no whole line of step {steps}: torn, or lost to a full disk")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (area/quantity; `time/<phase>` in seconds) and its findings (`diagnosis/<rule>` 1). A file system
        error costs the line and a warning, not the run."""
        findings = self._watch.step(step, metrics)
        metrics = {**metrics, **metrics_of(findings)}
        self._write(lambda: self._file.write(step, metrics), f"the metrics of step {step}", self._metrics_path)
        for place in (*self._loggers, self._view):
            place.log(step, metrics)
        for text in self._watch.to_say(findings):
            self.note(text)
        self._show_warnings()

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record sample rollouts: all in a file, the first `num_table_rows` on the terminal and in the loggers."""
        self._write(lambda: write_rows(self._rollouts, step, rows), f"the rollouts of step {step}", self._rollouts)
        shown = rows[: self._config.num_table_rows]
        if shown:
            for place in (*self._loggers, self._view):
                place.table(step, shown)
        self._show_warnings()

    def note(self, text: str) -> None:
        """Print a line for the user."""
        self._view.note(text)

    def close(self) -> None:
        """Close loggers, file and view; nothing may be reported afterwards."""
        with ExitStack() as last_first:  # whatever one of them raises, the others are closed and the terminal is restored
            last_first.callback(self._view.close)
            last_first.callback(self._file.close)
            last_first.callback(self._show_warnings)
            for logger in self._loggers:
                last_first.callback(logger.close)

    def _write(self, action: Callable[[], object], what: str, path: Path) -> None:
        try:
            action()
        except OSError as error:
            self._warnings.append(f"{what} could not be written, the run continues: {describe_os_error(error, path)}")

    def _show_warnings(self) -> None:
        warnings, self._warnings[:] = list(self._warnings), []
        for text in warnings:
            self._view.note(f"warning: {text}")


class SilentReporter:
    """Other ranks' reporter: takes the same calls and does nothing."""

    lost = ""

    def __enter__(self) -> SilentReporter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _ignore(self, *_: object) -> None: ...

    log = table = note = close = _ignore
