"""The steps of a job: one `srun` for each start of a component, watched and ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster import outcomes
from aligner.cluster.component import activated
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import Allocation, StopRequests, step_environment
from aligner.cluster.slurm.client import JobRecord, SlurmClient
from aligner.cluster.slurm.commands import Runtime, srun_command
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec
from aligner.errors import LaunchError
from aligner.telemetry.terminal import plain

_POLL_SECONDS = 0.1
_FORCE_SECONDS = 15.0  # from srun's own forced end to the kernel's
_READ_BYTES = 16384


class Step:
    """One start of a component. `srun`'s exit code is of little use; `outcome` is the ranks' own record."""

    def __init__(self, component: ComponentSpec, process: subprocess.Popen[bytes], outcomes_directory: Path, log: Path) -> None:
        self.component = component
        self.name = component.name
        self.started_at = time.monotonic()
        self.is_ready = False
        self._process = process
        self._outcomes = outcomes_directory
        self._log = log  # Slurm's own messages on this and earlier starts
        self._log_began = log.stat().st_size if log.exists() else 0

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def srun_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def outcome(self) -> outcomes.Outcome | None:
        """What explains its end; None if every rank was killed."""
        return outcomes.decisive(outcomes.read(self._outcomes))

    def describe_end(self) -> str:
        outcome, code = self.outcome(), self.srun_code()
        if outcome is None and self._was_out_of_memory():
            return f"{self.name} was killed: it took more memory than Slurm gave its step (slurm.memory)"
        if outcome is None:
            return f"{self.name} was killed, or its node was lost (srun's exit code {code})"
        message = f": {outcome.message}" if outcome.message else ""
        return f"{self.name}: rank {outcome.rank} ended with exit code {outcome.code}{message}"

    def _was_out_of_memory(self) -> bool:
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_began)
                return re.search(rb"(?i)oom.kill", file.read(_READ_BYTES)) is not None
        except FileNotFoundError:
            return False

    def send(self, number: int) -> None:
        """Signal srun, which passes SIGUSR1 on to every task and ends the step at once on SIGTERM."""
        if not self.has_ended():
            self._process.send_signal(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The common part of a job's steps: what the conductor is given, with the run's directory."""

    spec: JobSpec
    run: RunDirectory
    allocation: Allocation
    runtime: Runtime
    client: SlurmClient
    requests: StopRequests
    script: Path
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    say: Callable[[str], None]

    def start(self, component: ComponentSpec, *, key: str, variables: Mapping[str, str]) -> Step:
        """Start a component on its part of the job; its ranks write to `<run>/logs`. `key` is new for every start."""
        there = self.allocation
        outcomes_directory = self.run.jobs / there.job / "outcomes" / key
        log = self.run.logs / f"{component.name}.step.log"
        elsewhere = bool(there.beside and component.part)
        command = srun_command(
            component,
            self.spec.slurm,
            self.runtime,
            on=there.step_options(component.part),
            log=f"{self.run.logs}/{component.name}",
            shares=self.spec.shares(component),
            container=self.spec.container,
        )
        environment = {
            **step_environment(self.environ, self.runtime.home, in_container=self.runtime.is_container, of_another_job=elsewhere),
            **activated(component.python or sys.executable, self.environ),
            **variables,
            "ALIGNER_COMPONENT": component.name,
            outcomes.VARIABLE: str(outcomes_directory),
        }
        try:
            # A group of its own: a signal to the batch script's group must not end srun before the conductor has decided anything.
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"cannot start srun for {component.name}: {error}") from error
        return Step(component, process, outcomes_directory, log)

    def records(self) -> list[JobRecord]:
        """The parts of the job, as the controller knows them. Raises LaunchError."""
        return [record for job in (self.allocation.job, *self.allocation.beside) for record in self.client.show(job)]

    def lost(self, jobs: Iterable[str]) -> str:
        """Which of these jobs beside this one have ended, and with them their nodes; empty if none, or if Slurm does not answer."""
        try:
            over = [job for job in jobs if job in self.allocation.beside and self.client.is_over(job)]
        except LaunchError as error:
            self.say(f"warning: cannot ask whether the servers' jobs still run: {error}")
            return ""
        return f"job {' and '.join(over)}, which held nodes of this run, has ended" if over else ""

    def stop(self, steps: Sequence[Step], pause: Callable[[float], None], *, gently: bool = True) -> None:
        """End these steps and wait for it: SIGTERM to every task, SIGKILL after `shutdown_timeout_seconds` (at once unless `gently`)."""
        running = [step for step in steps if not step.has_ended()]
        if running and gently:
            self._signal_tasks(running, "TERM")
            running = _wait(running, self.spec.slurm.shutdown_timeout_seconds, pause)
        if running:
            self.say(f"killing {', '.join(step.name for step in running)}")
            for step in running:
                step.send(signal.SIGTERM)  # srun: "forcing job termination"
            running = _wait(running, _FORCE_SECONDS, pause)
        if running:
            self._signal_tasks(running, "KILL")
            for step in running:
                step.send(signal.SIGKILL)
            running = _wait(running, _FORCE_SECONDS, pause)
        if running:
            self.say(f"srun of {', '.join(step.name for step in running)} does not end; the end of the job will end it")

    def sweep(self, names: Collection[str]) -> None:
        """Kill steps of these names whose srun has ended: a killed srun leaves its tasks running."""
        try:
            left = [step for step, name in self.client.steps(self.allocation.jobs).items() if name in names]
            if left:
                self.say(f"killing steps {', '.join(left)}, which have lost their srun")
                self.client.signal_steps(left, "KILL")
        except LaunchError as error:
            self.say(f"warning: cannot end steps that have lost their srun: {error}")

    def _signal_tasks(self, steps: Sequence[Step], name: str) -> None:
        """Signal the tasks through the controller: srun would kill them. If the controller does not answer, the timeout decides."""
        names = {step.name for step in steps}
        try:
            self.client.signal_steps([step for step, its in self.client.steps(self.allocation.jobs).items() if its in names], name)
        except LaunchError as error:
            self.say(f"warning: cannot send SIG{name} to {', '.join(sorted(names))}: {error}")

    def last_lines(self, component: ComponentSpec, rank: int, count: int, *, since: int = 0) -> list[str]:
        """The end of a rank's log after its first `since` bytes, without colours; of Slurm's own messages if the rank did not write any."""
        path = self.run.log(component.name, rank)
        path = path if path.exists() else self.run.logs / f"{component.name}.step.log"
        try:
            with path.open("rb") as file:
                file.seek(max(since, os.fstat(file.fileno()).st_size - _READ_BYTES))
                return [plain(line) for line in file.read().decode(errors="replace").splitlines()[-count:]]
        except FileNotFoundError:
            return []


def _wait(steps: Sequence[Step], seconds: float, pause: Callable[[float], None]) -> list[Step]:
    """Wait up to `seconds` for these; returns those still running."""
    deadline = time.monotonic() + seconds
    while (running := [step for step in steps if not step.has_ended()]) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    return running
