"""One start of all components in the job's allocation, until the training component ends, and why.

A server that ends earlier is restarted as often as the settings allow, while the actor waits (its registration is removed).

`attempts.jsonl` is the `History` of a run: the outcome of every start, and whether a restart still helps.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from aligner.cluster.lease import Lease
from aligner.cluster.outcomes import TOO_EARLY, ExitCode
from aligner.cluster.run_directory import RunDirectory, is_ready, waits_for_its_turn
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, OnFailure
from aligner.cluster.slurm.steps import Place, Step
from aligner.errors import LaunchError
from aligner.models.checkpoint import files as checkpoint_files
from aligner.settings.user_code import was_calling

POLL_SECONDS = 0.25
PROGRESS_SECONDS = 60.0  # between two lines about the training in the job's own output
_SHOWN_LINES = 20
_PROGRESS_LINES = 400  # searched for the newest step: tables of samples come between


class Ending(str, Enum):
    """How an attempt came to its end."""

    done = "done"
    refused = "refused"
    halted = "halted"
    stopped = "stopped"
    crashed = "crashed"
    terminated = "terminated"  # Slurm is ending the job
    lost = "lost"  # the run belongs to somebody else now


_ENDINGS = {ExitCode.refused: Ending.refused, ExitCode.halted: Ending.halted, ExitCode.stopped: Ending.stopped}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An attempt's end, and why, for a person."""

    ending: Ending
    reason: str


class Attempt:
    """`number` counts the starts of all components in this job; `restarts` the servers that were started again in it."""

    def __init__(self, place: Place, lease: Lease, history: History, *, number: int) -> None:
        self._spec, self._slurm = place.spec, place.spec.slurm
        self._place = place
        self._requests, self._say = place.requests, place.say
        self._lease = lease
        self._history = history
        self._number = number
        self._steps: dict[str, Step] = {}
        self._starts: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._stop_deadline: float | None = None
        self._doomed: tuple[float, str] | None = None  # when the actor's grace ends, and what it lost
        self._progress = ""  # the newest line that was printed
        self._progress_at = time.monotonic() + PROGRESS_SECONDS
        self.restarts = 0

    def run(self, variables: Mapping[str, str], *, restarts: int) -> Verdict:
        """Start the components, servers first, and watch them to their end. `restarts`: earlier server restarts."""
        self._variables = dict(variables)
        self.restarts = restarts
        log = self._place.run.log(self._spec.components[0].name, 0)
        self._log_began = log.stat().st_size if log.exists() else 0  # what earlier starts have written
        for component in self._spec.components:
            self._place.run.service(component.name).unlink(missing_ok=True)
        try:
            for component in (*self._servers(), self._spec.components[0]):
                self._start(component)
            verdict = self._watch()
        except LaunchError as error:
            verdict = Verdict(ending=Ending.crashed, reason=str(error))
        if verdict.ending is Ending.terminated:  # Slurm has signalled every task, and this process has few seconds left
            for step in self._steps.values():
                step.send(signal.SIGTERM)
            return verdict
        self._place.stop(list(self._steps.values()), time.sleep, gently=verdict.ending is not Ending.lost)
        self._place.sweep(self._steps)
        return verdict

    def _servers(self) -> tuple[ComponentSpec, ...]:
        return self._spec.components[1:]

    @property
    def _actor(self) -> Step:
        return self._steps[self._spec.components[0].name]

    def _start(self, component: ComponentSpec) -> None:
        start = self._starts[component.name] = self._starts.get(component.name, -1) + 1
        key = f"{self._number}/{component.name}.{start}"
        self._steps[component.name] = self._place.start(component, key=key, variables=self._variables)

    def _watch(self) -> Verdict:
        while True:
            time.sleep(POLL_SECONDS)
            if self._requests.terminate:
                return Verdict(ending=Ending.terminated, reason="Slurm is ending the job")
            if lost := self._lease.lost:
                return Verdict(ending=Ending.lost, reason=lost)
            if self._actor.has_ended():
                return self._actor_ended()
            self._tell_progress()
            verdict = self._stop_in_order() if self._requests.stop else None
            verdict = verdict or self._watch_servers() or self._watch_for_the_end()
            if verdict is not None:
                return verdict

    def _tell_progress(self) -> None:
        """Once a minute, print the newest step of the training component's log, with its ETA; before the first step, its last line."""
        if time.monotonic() < self._progress_at:
            return
        self._progress_at = time.monotonic() + PROGRESS_SECONDS
        lines = list(filter(None, self._place.last_lines(self._actor.component, 0, _PROGRESS_LINES, since=self._log_began)))
        steps = [line for line in lines if line.startswith("step ")]
        newest = (steps or ([] if self._progress.startswith("step ") else lines))[-1:]
        if newest and newest[0] != self._progress:
            self._progress = newest[0]
            self._say(f"{self._actor.name}: {self._progress}")

    def _actor_ended(self) -> Verdict:
        actor = self._actor
        if step := done_step(self._place.run, self._spec):
            return Verdict(ending=Ending.done, reason=f"step {step} is reached")
        outcome = actor.outcome()
        ending = _ENDINGS.get(ExitCode(outcome.code), Ending.crashed) if outcome and outcome.code in set(ExitCode) else Ending.crashed
        if ending is Ending.crashed and self._requests.stop:
            return Verdict(ending=Ending.stopped, reason=f"it had to stop; {self._describe_end(actor)}")
        if ending is Ending.stopped:
            return Verdict(ending=ending, reason="stopped in order, with a checkpoint")
        self._show(actor, outcome.rank if outcome else 0)
        reason = (self._doomed[1] + "; " if self._doomed else "") + self._describe_end(actor)
        if (outcome.code if outcome else actor.srun_code()) == ExitCode.done:
            reason += f"; if that was its own exit code, it ended {TOO_EARLY}"
        return Verdict(ending=ending, reason=reason)

    def _stop_in_order(self) -> Verdict | None:
        """Signal the actor once; give up when its time is over."""
        now = time.time()
        if self._stop_deadline is None:
            self._stop_deadline = self._time_to_stop(now)
            self._actor.send(signal.SIGUSR1)
            seconds = self._stop_deadline - now
            self._say(f"SIGUSR1: {self._actor.name} may take {seconds:.0f} s to finish its step and save")
            self._history.add("stop_requested", seconds=round(seconds))
        if now < self._stop_deadline:
            return None
        self._place.stop([self._actor], time.sleep, gently=False)
        return Verdict(ending=Ending.stopped, reason="its step took too long and was abandoned: the newest checkpoint is kept")

    def _time_to_stop(self, now: float) -> float:
        """The actor's deadline: as requested from Slurm, or earlier if the job's time ends before (preemption)."""
        deadline = now + self._slurm.signal_seconds_before_end - self._slurm.abandon_seconds
        try:
            ends = [record.end_time for record in self._place.records()]
        except LaunchError as error:
            self._say(f"warning: cannot ask when the job ends: {error}")
            return deadline
        return min([deadline, *(end - self._slurm.abandon_seconds for end in ends if end is not None)])

    def _watch_servers(self) -> Verdict | None:
        """Restart ended servers; a verdict if a restart would not help."""
        for component in self._servers():
            name, step = component.name, self._steps[component.name]
            if name in self._restart_at:
                if time.monotonic() >= self._restart_at[name]:
                    del self._restart_at[name]
                    self._start(component)
                continue
            if self._doomed is None and (step.has_ended() or self._is_late(step)):
                verdict = self._server_died(step)
                if verdict is not None:
                    return verdict
        return None

    def _is_late(self, step: Step) -> bool:
        """Whether a server missed its registration deadline; ends it then."""
        step.is_ready = step.is_ready or is_ready(self._place.run, step.name)
        if step.is_ready:
            return False
        if waits_for_its_turn(self._place.run, step.name):
            step.started_at = time.monotonic()
        if time.monotonic() - step.started_at <= self._slurm.ready_timeout_seconds:
            return False
        self._say(f"{step.name} has not registered itself within slurm.ready_timeout_seconds={self._slurm.ready_timeout_seconds:g}")
        self._place.stop([step], time.sleep, gently=False)
        return True

    def _server_died(self, step: Step) -> Verdict | None:
        outcome = step.outcome()
        self._place.sweep([step.name])
        self._show(step, outcome.rank if outcome else 0)
        if outcome is not None and outcome.code in (ExitCode.refused, ExitCode.halted):
            return Verdict(ending=_ENDINGS[ExitCode(outcome.code)], reason=self._describe_end(step))
        lost = self._place.lost(self._place.allocation.jobs[step.component.part :][:1])
        allowed = self._slurm.on_server_failure is OnFailure.restart and self.restarts < self._slurm.max_server_restarts and not lost
        reason = f"{self._describe_end(step)}{f': {lost}' if lost else ''}"
        self._history.add("server_died", component=step.name, reason=reason, restarted=allowed)
        if allowed:
            self.restarts += 1
            self._place.run.service(step.name).unlink(missing_ok=True)
            self._restart_at[step.name] = time.monotonic() + self._slurm.restart_delay_seconds
            self._say(f"{reason}; starting it again ({self.restarts} of {self._slurm.max_server_restarts})")
            return None
        self._say(f"{reason}; {self._actor.name} may take {self._slurm.grace_seconds:g} s to notice and stop")
        self._doomed = (time.monotonic() + self._slurm.grace_seconds, reason)
        return None

    def _watch_for_the_end(self) -> Verdict | None:
        """A verdict if the actor must be ended: a server is lost for good, or ranks do not exit after the last step."""
        if self._doomed is not None and time.monotonic() > self._doomed[0]:
            return Verdict(ending=Ending.crashed, reason=self._doomed[1])
        done = self._place.run.done
        if step := done_step(self._place.run, self._spec):
            if time.time() - done.stat().st_mtime > self._slurm.spread_seconds:
                return Verdict(ending=Ending.done, reason=f"step {step} is reached; not every rank had left")
        return None

    def _describe_end(self, step: Step) -> str:
        """How it ended; if all ranks were killed, with the user code they were in (native crashes name no culprit)."""
        called: set[str] = set()
        if step.outcome() is None:
            called = {was_calling(self._place.run.calls(step.name, rank)) for rank in range(step.component.num_ranks)} - {""}
        return step.describe_end() + (f" while it called {'; '.join(sorted(called))}" if called else "")

    def _show(self, step: Step, rank: int) -> None:
        """The last lines of the rank that explains a step's end."""
        lines = self._place.last_lines(step.component, rank, _SHOWN_LINES)
        end = self._describe_end(step)
        self._say(f"{end}. Its last lines ({self._place.run.log(step.name, rank)}):" if lines else end)
        for line in lines:
            self._say(f"  | {line}")


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
