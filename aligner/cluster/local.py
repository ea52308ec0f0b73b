"""The local launcher: the components of a run as processes on this machine, ended together. Linux only.

The run ends when every rank of the main components has ended. Only their `done.json` marks it as done.
A process fails by a non-zero exit, as a main component that exits without `done.json`, or as a server that ends before the main
component with any code (PyTriton's parent exits 0 after Triton crashed). The main component then has `grace_seconds` to save a
checkpoint and stop. After that all processes and descendants are ended, by SIGTERM and then SIGKILL.

The launcher holds the run's lock, which excludes other launchers on this machine, and its lease, which excludes Slurm jobs of the
same run and by which its own processes notice its end. Signals are recorded and handled between two polls.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from aligner.cluster import lease as leases, processes
from aligner.cluster.component import Component, LocalLauncherConfig, check_components, free_ports, rank_environment
from aligner.cluster.console import Channel, Console
from aligner.cluster.lease import LeaseRecord
from aligner.cluster.outcomes import TOO_EARLY, ExitCode
from aligner.cluster.run_directory import RunDirectory, ServiceWatch
from aligner.cluster.slurm.client import SlurmClient
from aligner.errors import ConfigError, LaunchError, describe_os_error
from aligner.servers.processes import recorded_signals
from aligner.settings.user_code import was_calling

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exclusive(run_directory: RunDirectory) -> Iterator[None]:
    """Hold the run directory's lock. Raises LaunchError if another launcher holds it, ConfigError if it is not writable."""
    path = run_directory.path / "launcher.lock"
    try:
        lock = path.open("a")
    except OSError as error:
        raise ConfigError(f"run.directory={run_directory.path}: {describe_os_error(error, path)}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"another launcher is running in {run_directory.path} (it holds {path.name})") from None
        yield


_SCONTROL_SECONDS = 30.0
_SETTLE_SECONDS = 0.05  # the run directory's lock keeps other launchers of this machine away already


@contextmanager
def hold(run_directory: RunDirectory, valid_seconds: float) -> Iterator[dict[str, str]]:
    """Hold the run's lease; yields the variables for its processes. Raises RunHeld if a Slurm job, or another machine, holds it."""
    job = f"local-{os.getpid()}"
    record = LeaseRecord(job=job, attempt=f"{job}.0", host=socket.gethostname(), pid=os.getpid(), valid_seconds=valid_seconds)
    lease = leases.claim(run_directory.lease, record, is_over=_is_over, settle_seconds=_SETTLE_SECONDS)
    try:
        yield {leases.ATTEMPT_VARIABLE: record.attempt, leases.VARIABLE: str(run_directory.lease)}
    finally:
        lease.release()


def _is_over(other: LeaseRecord) -> bool | None:
    if other.host == socket.gethostname() and other.job.startswith("local-"):
        return True  # this launcher has the lock that the other one held
    if not other.job.isdigit() or shutil.which("scontrol") is None:
        return None
    try:
        return SlurmClient(_SCONTROL_SECONDS).is_over(other.job)
    except LaunchError:  # no controller here: the signs of life decide
        return None


_POLL_SECONDS = 0.1
FINAL_FAILURES = (ExitCode.refused, ExitCode.halted)


def launch(
    components: Sequence[Component],
    *,
    run_directory: RunDirectory,
    config: LocalLauncherConfig | None = None,
    expect_services: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> int:
    """Run the components to their end and return the exit code: 0 with `done.json`, or that of the process that failed first. A process
    killed by signal n counts as 128 + n, a premature exit with 0 as 1; Ctrl-C gives 130, SIGTERM 143, SIGHUP 129, or 75 if the main
    components saved a checkpoint and stopped cleanly. `environment` is the base of the ranks'."""
    if sys.platform != "linux":
        raise LaunchError(f"the local launcher needs Linux (/proc, parent-death signals); this is {sys.platform}")
    check_components(components, expect_services)
    config = config or LocalLauncherConfig()
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in _STOP if is_main and signal.getsignal(number) is not signal.SIG_IGN]  # nohup: stays ignored
    with exclusive(run_directory), recorded_signals(taken) as signals, hold(run_directory, config.lease_seconds) as lease:
        services = ServiceWatch(run_directory, [c.name for c in components], expect_services, config.ready_timeout_seconds)
        with (
            Console(components, run_directory, stream or sys.stdout) as console,
            guarded(console.log, config.shutdown_timeout_seconds) as marker,
        ):
            run = _Run(config, console, signals, services, run_directory)
            try:
                run.start(components, {**(os.environ if environment is None else environment), **lease}, marker)
                return run.supervise()
            finally:
                run.tear_down()
                run.report()


@dataclass(eq=False)
class _Run:
    _config: LocalLauncherConfig
    _console: Console
    _signals: list[int]
    _services: ServiceWatch
    _run_directory: RunDirectory

    def __post_init__(self) -> None:
        self._note = self._console.note
        self._done_before = _identity(self._run_directory.done)  # by an earlier start of the run
        self._restarts = 0
        self._ranks: list[Rank] = []
        self._started = time.monotonic()
        self._failed: Rank | None = None

    def start(self, components: Sequence[Component], environment: Mapping[str, str], marker: str) -> None:
        """Start every rank of every component, servers first."""
        self._marker = marker
        # A launcher inside a rank of another one: its processes stay visible to the outer one.
        markers = ",".join(filter(None, (environment.get(processes.MARKER_VARIABLE), marker)))
        self._environment = {**environment, processes.MARKER_VARIABLE: markers}
        ports = free_ports(len(components))
        for component, port in sorted(zip(components, ports, strict=True), key=lambda pair: pair[0].main):
            self._start(component, port)

    def _start(self, component: Component, port: int) -> None:
        started = []
        for rank in range(component.num_processes):
            channel, writer = self._console.open_channel(component, rank, self._run_directory.log(component.name, rank))
            try:
                process = subprocess.Popen(
                    processes.exec_command(list(component.command)),  # SIGTERM from the kernel when this process dies
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    env=rank_environment(component, rank, port, self._environment),
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            started.append(Rank(component, rank, process, channel))
            self._ranks.append(started[-1])
        pids = ", ".join(str(rank.pid) for rank in started)
        self._note(f"{component.name}: started (pid {pids}), log {self._run_directory.logs.name}/{component.name}.*.log")

    def supervise(self) -> int:
        """Wait for the run's end; the exit code."""
        while True:
            self._pump(_POLL_SECONDS)
            if self._signals:
                return self._stop_on_signal()
            if all(rank.exit_code == 0 for rank in self._mains()) and self._is_done():
                self._note(f"{self._main_names()} finished after {time.monotonic() - self._started:.1f} s")
                return 0
            if any(rank.exit_code == ExitCode.stopped for rank in self._mains()):
                return self._stopped_in_order()
            self._failed = failed = self._first_failure()
            left = self._restarts < self._config.max_server_restarts
            if failed is not None and left and not failed.component.main and failed.exit_code not in FINAL_FAILURES:
                self._restart(failed)
            elif self._failed is not None:
                return self._stop_on_failure(self._failed)
            for line in self._services.poll():
                self._note(line)

    def _mains(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.component.main]

    def _main_names(self) -> str:
        return " and ".join(dict.fromkeys(rank.component.name for rank in self._mains()))

    def _pump(self, seconds: float) -> None:
        """Show and log what the ranks wrote within `seconds`, then look which of them ended."""
        self._console.pump(seconds)
        for rank in self._ranks:
            if rank.exit_code is None and rank.poll():
                self._console.drain(rank.channel)

    def _is_done(self) -> bool:
        """Whether `done.json` is from this start: the main components write it before any of their ranks exits."""
        return _identity(self._run_directory.done) not in (None, self._done_before)

    def _first_failure(self) -> Rank | None:
        """A rank that ended with an error, else a server that ended at all, or a rank of a main component before the run was done."""
        ended = [rank for rank in self._ranks if rank.exit_code is not None]
        wrong = [rank for rank in ended if rank.exit_code]
        early = [rank for rank in ended if not (rank.component.main and self._is_done())]
        return next(iter(wrong + early), None)

    def _restart(self, failed: Rank) -> None:
        """End a server's remaining ranks, start all of them again, and wait for the registration again."""
        component, self._failed = failed.component, None
        self._restarts += 1
        self._note(f"{failed.name} {self._ending(failed)}; starting it again ({self._restarts} of {self._config.max_server_restarts})")
        old = [rank for rank in self._ranks if rank.component is component]
        sessions = {rank.pid for rank in old}
        processes.end(lambda: processes.find("", sessions), self._config.shutdown_timeout_seconds, self._pump)
        self._pump(0.0)
        self._ranks = [rank for rank in self._ranks if rank.component is not component]
        for rank in old:
            rank.reap()
        self._services.again(component.name)
        self._start(component, free_ports(1)[0])

    def _stopped_in_order(self) -> int:
        """A main component ended by itself before its last step, with a checkpoint."""
        self._wait_for_mains()
        self._failed = next((rank for rank in self._mains() if rank.exit_code not in (None, ExitCode.stopped)), None)
        if self._failed is not None:
            return self._failed.exit_code or 1
        self._note(f"{self._main_names()} stopped before the last step, with a checkpoint; the same command continues from there")
        return ExitCode.stopped

    def _stop_on_failure(self, failed: Rank) -> int:
        self._note(f"{failed.name} {self._ending(failed)} during the run")
        if not failed.component.main:
            self._services.gone(failed.component.name, f"{failed.name} {self._ending(failed)}, and the launcher does not restart it")
        if any(rank.exit_code is None for rank in self._mains()):
            self._note(f"{self._main_names()} may take {self._config.grace_seconds:g} s to save a checkpoint and stop; then all are ended")
            self._wait_for_mains()
        return failed.exit_code or 1

    def _stop_on_signal(self) -> int:
        number = self._signals[0]
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._note(f"{name}: passed on to {self._main_names()}, which may take {self._config.grace_seconds:g} s; once more to end all now")
        processes.send([rank.pid for rank in self._mains() if rank.exit_code is None], number)
        self._wait_for_mains()
        if all(rank.exit_code == ExitCode.stopped for rank in self._mains()):
            return self._stopped_in_order()
        return 128 + number

    def _wait_for_mains(self) -> None:
        """Wait until the main components end, the grace is over, or the user asks (again) to stop."""
        asked = len(self._signals)
        deadline = time.monotonic() + self._config.grace_seconds
        while any(rank.exit_code is None for rank in self._mains()) and time.monotonic() < deadline:
            if len(self._signals) > asked:
                return
            self._pump(_POLL_SECONDS)

    def tear_down(self) -> None:
        """End every rank (SIGTERM, so that it can clean up), then all other live processes of the run."""
        seconds = 0.0 if len(self._signals) > 1 else self._config.shutdown_timeout_seconds
        deadline = time.monotonic() + seconds
        running = [rank for rank in self._ranks if rank.exit_code is None]
        for rank in running:
            rank.stopped_by_us = True
        processes.send([rank.pid for rank in running], processes.signal.SIGTERM)
        while any(rank.exit_code is None for rank in running) and time.monotonic() < deadline:
            if len(self._signals) > 1:
                break
            self._pump(_POLL_SECONDS)
        late = [rank.name for rank in running if rank.exit_code is None]
        if late:
            self._note(f"{', '.join(late)} did not end {seconds:g} s after SIGTERM: killing")
        sessions = {rank.pid for rank in self._ranks}
        # What ignored one SIGTERM gets no second period; what only now hears of the end (a grandchild) gets a second of it.
        left = processes.end(lambda: processes.find(self._marker, sessions), 0.0 if late else 1.0, self._pump)
        self._console.drawing_ended()
        if left:
            self._note(f"processes {sorted(left)} could not be ended")
        for rank in self._ranks:
            rank.reap()
        if not left:
            self._services.all_ended()

    def report(self) -> None:
        """Print what went wrong, as the last output."""
        for rank in self._ranks:
            if rank is not self._failed and rank.exit_code not in (None, 0, ExitCode.stopped) and not rank.stopped_by_us:
                self._note(f"{rank.name} {self._ending(rank)}")
        if self._failed is None:
            return
        failed = self._failed
        lines = failed.channel.last_lines(self._config.num_failure_lines)
        self._note(f"FAILED: component {failed.component.name}, rank {failed.rank}, {self._ending(failed)}")
        self._note(f"its last {len(lines)} lines (all of them in {failed.channel.log_path}):" if lines else "it wrote nothing")
        for line in lines:
            self._note(f"  | {line}")

    def _ending(self, rank: Rank) -> str:
        """How it ended; if a signal killed it, with the user code it was in (native crashes name no culprit)."""
        called = was_calling(self._run_directory.calls(rank.component.name, rank.rank)) if rank.signal is not None else ""
        return rank.ending() + (f" while it called {called}" if called else "")


def _identity(path: Path) -> tuple[int, int] | None:
    """Identity of a file that is only replaced as a whole; None if missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


_GUARD_MARGIN_SECONDS = 15.0


class Rank:
    """A started process, leader of a session of its own. Reaped only at the end, so that no other session can get its pid."""

    def __init__(self, component: Component, rank: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.component = component
        self.rank = rank
        self.name = component.prefix(rank)
        self.pid = process.pid
        self.channel = channel
        self.exit_code: int | None = None
        self.stopped_by_us = False
        self._process = process
        self.signal: int | None = None  # that ended it

    def poll(self) -> bool:
        """Whether the process has ended; sets `exit_code` (128 + n if signal n killed it)."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return False
        if status.si_code == os.CLD_EXITED:
            self.exit_code = status.si_status
        else:
            self.signal = status.si_status
            self.exit_code = 128 + status.si_status
        return True

    def ending(self) -> str:
        if self.signal is not None:
            return f"was killed by {signal.Signals(self.signal).name} (exit code {self.exit_code})"
        if self.component.main and self.exit_code == 0:
            return f"ended with exit code 0 {TOO_EARLY}"
        return f"ended with exit code {self.exit_code}"

    def reap(self) -> None:
        """Release the process table's entry of a process that has ended; one that SIGKILL could not end is left to the kernel."""
        if self.exit_code is not None or self.poll():
            self._process.wait()


@contextmanager
def guarded(log: Path, seconds: float) -> Iterator[str]:
    """Yields a marker. A process waits for the end of this one; after a kill -9 it ends processes with the marker."""
    marker = secrets.token_hex(16)
    command = processes.guard_command(marker, seconds)
    with log.open("ab") as output:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
    try:
        yield marker
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(timeout=seconds + _GUARD_MARGIN_SECONDS)
