"""`attempts.jsonl`: the outcome of every start of a run, and whether a restart still helps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.spec import JobSpec
from aligner.models.checkpoint import files as checkpoint_files

SUBMITTED, STARTED, ENDED = "job_started", "attempt_started", "job_ended"


class History:
    """Appends lines; each is one JSON object with `time`, `event`, `job` and the event's details."""

    def __init__(self, path: Path, job: str) -> None:
        self._path = path
        self._job = job

    def add(self, event: str, **details: Any) -> None:
        """One line, on disk when this returns. Raises OSError on a full disk."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, "job": self._job, **details})
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All lines, oldest first; a truncated last line is left out."""
        lines = []
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines

    def ending_of(self, job: str) -> str:
        """The recorded ending of a job of this run; empty if none is recorded."""
        lines = [line for line in self.read() if line["job"] == job and line["event"] == ENDED]
        return str(lines[-1]["ending"]) if lines else ""

    def started_after(self, job: str) -> str:
        """A job of this run that has started since that one did; empty without one."""
        jobs = [line["job"] for line in self.read() if line["event"] == SUBMITTED]
        return next((later for later in reversed(jobs) if later != job), "") if job in jobs and jobs[-1] != job else ""

    def starts_after(self, step: int) -> int:
        """How many of the newest attempts started after this same step, since a person last submitted the run."""
        count = 0
        for line in reversed(self.read()):
            if line["event"] == STARTED and line["step"] != step:
                break
            count += line["event"] == STARTED
            if line["event"] == SUBMITTED and not line["continues"]:
                break
        return count


def no_progress(history: History, newest: int, allowed: int) -> str:
    """Why another start would be useless: too many produced no checkpoint newer than step `newest`; empty while it may help."""
    starts = history.starts_after(newest)
    if starts <= allowed:
        return ""
    return f"{starts} starts in a row produced no checkpoint newer than step {newest} (slurm.max_restarts_without_progress={allowed})"


def newest_step(run: RunDirectory, folders: Sequence[str]) -> int:
    """The newest step whose checkpoint is complete in all of the folders; 0: none is. A run resumes after it."""
    steps = [set(checkpoint_files.complete_steps(run.checkpoints / folder)) for folder in folders]
    return max(set.intersection(*steps), default=0) if steps else 0


def done_step(run: RunDirectory, spec: JobSpec) -> int:
    """The step at which this run is over by `done.json`; 0 if it is not, or `spec` now requires more steps."""
    try:
        done = json.loads(run.done.read_text())
        over = done["step"] >= spec.max_steps > 0 or done.get("epochs", 0) >= spec.epochs > 0
        return int(done["step"]) if over else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: the run will write it again at its end
        return 0
