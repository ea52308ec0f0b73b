"""`attempts.jsonl`: the outcome of every start of a run, and whether a restart still helps.

`FollowingJobs` continue a run: the successor, submitted when a job must stop, and the follow-up, queued in case of a crash.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import Allocation, submission_environment
from aligner.cluster.slurm.client import JobRecord, SlurmClient
from aligner.errors import LaunchError
from aligner.models import checkpoint_files

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


def newest_step(run: RunDirectory, folders: Sequence[str]) -> int:
    """The newest step whose checkpoint is complete in all of the folders; 0: none is. A run goes on after it."""
    steps = [set(checkpoint_files.complete_steps(run.checkpoints / folder)) for folder in folders]
    return max(set.intersection(*steps), default=0) if steps else 0


def done_step(run: RunDirectory) -> int:
    """The step that `done.json` says the run has reached; 0 if there is none."""
    try:
        return int(json.loads(run.done.read_text())["step"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):  # damaged: the run will write it again when it comes there
        return 0


class FollowingJobs:
    """Submits and cancels them. Each runs the same script with the same arguments, so in the same run directory."""

    def __init__(
        self,
        allocation: Allocation,
        client: SlurmClient,
        history: History,
        *,
        script: Path,
        arguments: Sequence[str],
        components: Sequence[JobRecord],
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`components`: the job's own; following jobs inherit their partition, account and time limit."""
        self._allocation = allocation
        self._client = client
        self._history = history
        self._script = script
        self._arguments = list(arguments)
        self._options = [component.options for component in components]
        self._environ = environ
        self._say = say
        self.follow_up = ""

    def queue_follow_up(self) -> None:
        """Queue the job that starts if this one fails. Without it the run still continues, until a crash."""
        try:
            self.follow_up = self._submit("afternotok")
        except LaunchError as error:
            self._say(f"warning: no job is queued for the case of a crash: {error}")
            return
        self._history.add("follow_up_queued", follow_up=self.follow_up)
        self._say(f"job {self.follow_up} is queued for the case that this one crashes")

    def submit_successor(self) -> None:
        """Submit the job that continues this one; if that fails, the follow-up takes its place."""
        try:
            successor = self._submit("afterany")
        except LaunchError as error:
            self._history.add("successor_failed", reason=str(error), follow_up=self.follow_up)
            instead = f"job {self.follow_up} goes on instead" if self.follow_up else "submit the same again to go on"
            self._say(f"warning: cannot submit the next job ({error}); {instead}")
            return
        self._history.add("successor_submitted", successor=successor)
        self._say(f"job {successor} goes on after this one")
        self.cancel_follow_up("a successor is submitted")

    def cancel_follow_up(self, reason: str) -> None:
        """Called when it must not start. A failure is reported: the user must then cancel it."""
        if not self.follow_up:
            return
        job, self.follow_up = self.follow_up, ""
        try:
            self._client.cancel(job)
        except LaunchError as error:
            self._say(f"warning: job {job} is not needed ({reason}) and could not be cancelled: {error}. Cancel it: scancel {job}")
            return
        self._history.add("follow_up_cancelled", follow_up=job, reason=reason)

    def _submit(self, dependency: str) -> str:
        first, *others = self._options or [()]
        options = [f"--dependency={dependency}:{self._allocation.job}", "--kill-on-invalid-dep=yes"]
        options += [f"--job-name={self._allocation.name}", *first]
        for other in others:
            options += [":", *other]
        return self._client.submit(
            options,
            self._script,
            self._arguments,
            cwd=self._allocation.submit_directory,
            environ=submission_environment(self._environ, self._allocation.job),
        )
