"""One process of a component, and the guard that outlives a killed launcher."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from aligner.cluster import processes
from aligner.cluster.component import Component, rank_environment
from aligner.cluster.config import LocalLauncherConfig
from aligner.cluster.console import Channel, Console
from aligner.cluster.outcomes import TOO_EARLY

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
        self._signal: int | None = None

    def poll(self) -> bool:
        """Whether the process has ended; sets `exit_code` (128 + n where signal n killed it)."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return False
        if status.si_code == os.CLD_EXITED:
            self.exit_code = status.si_status
        else:
            self._signal = status.si_status
            self.exit_code = 128 + status.si_status
        return True

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return self._signal is not None

    def ending(self) -> str:
        """A description of its abnormal end."""
        if self._signal is not None:
            return f"was killed by {signal.Signals(self._signal).name} (exit code {self.exit_code})"
        if self.component.main and self.exit_code == 0:
            return f"ended with exit code 0 {TOO_EARLY}"
        return f"ended with exit code {self.exit_code}"

    def reap(self) -> None:
        """Release the process table's entry of a process that has ended; one that SIGKILL could not end is left to the kernel."""
        if self.exit_code is not None or self.poll():
            self._process.wait()


def start_rank(
    component: Component,
    rank: int,
    port: int,
    *,
    marker: str,
    log: Path,
    base: Mapping[str, str] | None,
    console: Console,
) -> Rank:
    """Start one rank: own session, SIGTERM from the kernel when this process dies, stdin empty, stdout and stderr into one channel."""
    surrounding = os.environ if base is None else base
    environment = rank_environment(component, rank, port, surrounding)
    # A launcher inside a rank of another one: its processes stay visible to the outer one.
    environment[processes.MARKER_VARIABLE] = ",".join(filter(None, (surrounding.get(processes.MARKER_VARIABLE), marker)))
    channel, writer = console.open_channel(component, rank, log)
    try:
        process = subprocess.Popen(
            processes.exec_command(list(component.command)),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(writer)
    return Rank(component, rank, process, channel)


class Guard:
    """A process that waits for the end of this one; after a kill -9 it ends processes with `marker`."""

    def __init__(self, config: LocalLauncherConfig, log: Path) -> None:
        self.marker = secrets.token_hex(16)
        self._log = log
        self._seconds = config.shutdown_timeout_seconds

    def __enter__(self) -> Guard:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                processes.guard_command(self.marker, self._seconds),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=self._seconds + _GUARD_MARGIN_SECONDS)
