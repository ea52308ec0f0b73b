"""The one reader of a run's directory, of a run that is over, under way, or failed before its first step.

A missing file is an empty result, and a half-written last line is left out. Other damage raises DataError, which names file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import DataError
from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import StepMetrics, read_metrics
from aligner.reporting.rollout_table import read_rows
from aligner.reporting.summary import table
from aligner.telemetry.recording import read_spans
from aligner.telemetry.run_files import RunFiles
from aligner.telemetry.spans import Span
from aligner.types import SampleRow


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

    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.files.metrics) if self.files.metrics.is_file() else []

    def config(self) -> dict[str, Any]:
        """The resolved configuration. Raises DataError for a damaged one."""
        try:
            return dict(yaml.safe_load(self.files.config.read_text(encoding="utf-8"))) if self.files.config.is_file() else {}
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise DataError(f"{self.files.config}: not the configuration of a run: {error}") from error

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

    def before_and_after(self) -> tuple[Samples | None, Samples | None]:
        """The samples of the first and of the last validation; None without one."""
        paths = sorted(self.files.validation.glob("step_*.jsonl"))
        return (_samples(paths[0]), _samples(paths[-1])) if paths else (None, None)

    def spans(self) -> tuple[list[Span], int]:
        """What all processes recorded, by start within each component; and how many lines cannot be read."""
        return read_spans(self.files.trace)


def _samples(path: Path) -> Samples:
    return Samples(step=int(path.stem.removeprefix("step_")), rows=read_rows(path))
