"""The one reader of a run's directory, of a run that is over, under way, or failed before its first step.

A missing file is an empty result, and a half-written last line is left out. Other damage raises DataError, which names file and line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import DataError
from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import StepMetrics, read_metrics, read_metrics_since
from aligner.reporting.rollout_table import read_rows
from aligner.reporting.summary import table
from aligner.telemetry.recording import read_spans
from aligner.telemetry.run_files import RunFiles
from aligner.telemetry.spans import Span
from aligner.types import SampleRow

FRESH_SECONDS = 60.0  # a run whose processes gave no sign of life for longer has ended
_TAIL_BYTES = 1 << 16


class State(str, Enum):
    """How far a run is."""

    absent = "absent"  # the directory holds no run
    under_way = "under way"
    done = "done"
    ended = "ended"  # before its last step: stopped, failed or killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """`step`: the newest one in the metrics. `reason`: why the run ended or learned nothing, if it recorded that."""

    state: State
    step: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Responses of one step: of a validation to its prompts, or sample rollouts."""

    step: int
    rows: list[SampleRow]


class RunView:
    """What the run in `directory` has written so far; every call reads it anew."""

    def __init__(self, directory: Path | str) -> None:
        self.files = RunFiles(Path(directory))

    def begun(self, asked: str = "") -> RunView:
        """This view. Raises DataError, beginning with `asked` (default: the directory), if the run has no metrics."""
        if not self.files.metrics.is_file():
            name = self.files.metrics.name
            raise DataError(f"{asked or self.files.path}: has no {name}; expected the directory of a run that has begun to train")
        return self

    def status(self) -> Status:
        """Whether the run is done, under way, or has ended early, and why."""
        files, steps = self.files, self.metrics()
        step = steps[-1].step if steps else 0
        if files.done.is_file():
            return Status(state=State.done, step=step, reason=_text(files.learnt_nothing))
        if not files.path.is_dir() or not (files.identity.is_file() or files.config.is_file() or steps):
            return Status(state=State.absent, step=step)
        signs = [path.stat().st_mtime for path in (files.lease, *files.health.glob("*.json")) if path.is_file()]
        if max(signs, default=0.0) > time.time() - FRESH_SECONDS:
            return Status(state=State.under_way, step=step)
        reasons = [str(line["reason"]) for line in self.attempts() if line.get("reason")]
        return Status(state=State.ended, step=step, reason=reasons[-1] if reasons else "")

    def config(self) -> dict[str, Any]:
        """The resolved settings; empty if the run did not get that far, or the file is another program's."""
        found = yaml.safe_load(_text(self.files.config))
        return found if isinstance(found, dict) else {}

    def metrics(self) -> list[StepMetrics]:
        """All steps so far."""
        return read_metrics(self.files.metrics) if self.files.metrics.is_file() else []

    def metrics_since(self, offset: int) -> tuple[list[StepMetrics], int]:
        """The steps from byte `offset` on, and the offset for the next call. The last step comes again then: it may have grown."""
        return read_metrics_since(self.files.metrics, offset) if self.files.metrics.is_file() else ([], 0)

    def newest(self, metric: str) -> float | None:
        """The last value of a metric; None if no step has it."""
        return next((step.values[metric] for step in reversed(self.metrics()) if metric in step.values), None)

    def summary(self, columns: Sequence[Column]) -> str:
        """First, last and best value of each metric and its course, as a table of text."""
        steps = self.metrics()
        return table(steps, columns) if steps else f"no steps in {self.files.metrics}"

    def diagnosis(self) -> Diagnosis:
        """The findings of all rules so far."""
        return diagnose(self.metrics(), RULES)

    def rollouts(self) -> list[Samples]:
        """The sample rollouts of every step that has some."""
        return [_samples(path) for path in _step_files(self.files.rollouts)]

    def before_and_after(self) -> tuple[Samples | None, Samples | None]:
        """The samples of the first and of the last validation; None without one."""
        paths = _step_files(self.files.validation)
        return (_samples(paths[0]), _samples(paths[-1])) if paths else (None, None)

    def spans(self) -> tuple[list[Span], int]:
        """What all processes recorded, by start within each component; and how many lines cannot be read."""
        return read_spans(self.files.trace)

    def attempts(self) -> list[dict[str, Any]]:
        """The starts and ends of the run's Slurm jobs, oldest first; lines that were cut are left out."""
        found = []
        for line in _text(self.files.attempts).splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def logs(self) -> list[Path]:
        """The log files of all processes, by name."""
        return sorted(self.files.logs.glob("*.log"))

    def last_lines(self, log: Path, count: int) -> list[str]:
        """The end of a log, at most `count` whole lines of its last 64 KiB."""
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _step_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*.jsonl"))


def _samples(path: Path) -> Samples:
    return Samples(step=int(path.stem.removeprefix("step_")), rows=read_rows(path))
