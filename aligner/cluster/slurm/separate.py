"""A run as one job for each of its parts, for sites without heterogeneous jobs (`slurm.separate`).

The servers' jobs only hold their nodes (`hold`). The actor's job starts after all of them (`after`) and runs the conductor, whose steps for
the servers use the other jobs' nodes (`srun --jobid`). The others find the actor's job in a file, since it is submitted last.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster.outcomes import ExitCode
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import StopRequests
from aligner.cluster.slurm.client import OVER, SlurmClient
from aligner.cluster.slurm.spec import JobSpec, part_options
from aligner.errors import LaunchError
from aligner.files import publish

_POLL_SECONDS = 0.25
_ASK_SECONDS = 5.0  # from one question to the controller to the next
_NOTE_SECONDS = 300.0  # from the submission of a job to that of the actor's, and for its file to be seen on another node


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The jobs of one run: `options[k]` of sbatch are those of part k, the actor's first; the others find the actor's in `note`."""

    options: tuple[tuple[str, ...], ...]
    note: Path
    idle_seconds: float
    command_seconds: float

    @classmethod
    def of(cls, spec: JobSpec, name: str, more: Sequence[Sequence[str]] = ()) -> Together:
        """`more[k]` are further options of part k, which count more than those in the settings."""
        options = []
        for number, part in enumerate(spec.parts()):
            own = f"{name}-{'-'.join(component.name for component in part)}" if number else name
            asked = [option for line in part_options(part, spec.slurm) for option in line]
            options.append((f"--job-name={own}", *asked, *(more[number] if number < len(more) else ())))
        note = RunDirectory(Path(spec.run_directory)).jobs / f"together-{uuid.uuid4().hex[:8]}.json"
        seconds = spec.slurm.command_timeout_seconds
        return cls(options=tuple(options), note=note, idle_seconds=spec.idle_seconds, command_seconds=seconds)

    def submit(
        self, client: SlurmClient, script: Path, arguments: Sequence[str], *, cwd: Path, environ: Mapping[str, str], after: str = ""
    ) -> str:
        """The id of the actor's job; all wait until `after` has ended. Raises LaunchError, and leaves no job then."""
        first, *others = self.options
        ended = [f"afterany:{after}"] if after else []
        jobs: list[str] = []
        try:
            self.note.parent.mkdir(parents=True, exist_ok=True)
            for options in others:
                holds = [f"--holds-for={self.note}", "--", *arguments]
                jobs.append(client.submit([*_dependency(ended), *options], script, holds, cwd=cwd, environ=environ))
            dependency = _dependency([*ended, f"after:{':'.join(jobs)}"])
            leader = [f"--beside={','.join(jobs)}", "--", *arguments]
            jobs.insert(0, client.submit([*dependency, *first], script, leader, cwd=cwd, environ=environ))
            record = {"job": jobs[0], "idle_seconds": self.idle_seconds, "command_seconds": self.command_seconds}
            publish(self.note, lambda new: new.write_text(json.dumps(record) + "\n"))
        except (LaunchError, OSError) as error:
            for job in jobs:
                client.cancel(job)
            raise error if isinstance(error, LaunchError) else LaunchError(f"{self.note}: cannot be written: {error}") from error
        return jobs[0]

    def commands(self) -> list[list[str]]:
        """The commands in the order of submission, for a person: the script's path and its settings follow."""
        first, *others = self.options
        return [["sbatch", *options] for options in (*others, first)]


def _dependency(conditions: Sequence[str]) -> list[str]:
    return [f"--dependency={','.join(conditions)}", "--kill-on-invalid-dep=yes"] if conditions else []


def hold(note: Path, requests: StopRequests, say: Callable[[str], None]) -> int:
    """Hold this job's nodes until the actor's job is over; the exit code. A warning of this job's end is passed on to that job. Gives up if
    that one has not begun after `idle_seconds`: it notices it then, and all are submitted again."""
    record = _read(note, requests)
    if record is None:
        return ExitCode.failed
    job, client, began = str(record["job"]), SlurmClient(float(record["command_seconds"])), time.monotonic()
    say(f"holds its nodes for job {job}; see that job's output")
    has_begun = is_passed_on = has_warned = False
    while not requests.terminate:
        if requests.stop and not is_passed_on:
            say(f"SIGUSR1: this job is near its end; passed on to job {job}")
            is_passed_on = True
            try:
                client.run("scancel", "--quiet", "--batch", "--signal=USR1", job)
            except LaunchError as error:
                say(f"warning: {error}")
        try:
            states = [one.state for one in client.show(job)]
            has_warned = False
        except LaunchError as error:
            if not has_warned:
                say(f"warning: cannot ask about job {job}: {error}")
            states, has_warned = ["RUNNING"], True
        if all(state in OVER for state in states):
            say(f"job {job} is over")
            return ExitCode.done
        has_begun = has_begun or "RUNNING" in states
        if not has_begun and time.monotonic() - began > float(record["idle_seconds"]):
            say(f"job {job} has not begun for {float(record['idle_seconds']):g} s (server.idle_timeout_seconds): the nodes are given back")
            return ExitCode.done
        deadline = time.monotonic() + _ASK_SECONDS
        while time.monotonic() < deadline and not requests.terminate and (is_passed_on or not requests.stop):
            time.sleep(_POLL_SECONDS)
    return ExitCode.failed


def _read(note: Path, requests: StopRequests) -> dict[str, object] | None:
    """The note of the actor's job, once it is there; None if Slurm ends this one before. Raises LaunchError after `_NOTE_SECONDS`."""
    deadline = time.monotonic() + _NOTE_SECONDS
    while not requests.terminate:
        try:
            record: dict[str, object] = json.loads(note.read_text())
            return record
        except FileNotFoundError:
            if time.monotonic() > deadline:
                message = f"waited {_NOTE_SECONDS:g} s for {note}, which names the actor's job: this job holds nodes for nobody, and ends"
                raise LaunchError(message) from None
        time.sleep(_POLL_SECONDS)
    return None
