"""Signals to the launcher as a list to look at, and the lock that keeps two launchers out of one run directory."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ConfigError, LaunchError, describe_os_error

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While active, SIGINT, SIGTERM and SIGHUP are recorded instead of ending the process; the old handlers come back afterwards.

    Python delivers signals to the main thread only: in another thread nothing is installed and nothing is received.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: stays ignored
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)

    def name(self) -> str:
        """The first signal, as a user knows it."""
        return "Ctrl-C" if self.received[0] == signal.SIGINT else signal.Signals(self.received[0]).name


@contextmanager
def exclusive(run_directory: RunDirectory) -> Iterator[None]:
    """Hold the run directory's lock; the kernel releases it however this process ends.

    Raises:
        LaunchError: another launcher holds it.
        ConfigError: it cannot be written.
    """
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
