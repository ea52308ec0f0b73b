"""Runs of recipes as a user starts them, in processes of their own, with the CPU time that they took."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_SECONDS, GRACE_SECONDS = (1200.0, 60.0)  # for one run, and for its end where it takes longer

# recipe, run directory, settings -> CPU seconds of the run and all that it started
Launch = Callable[[str, Path, Sequence[str]], float]


class CaseFailed(Exception):
    """A run did not come to its end."""


def launch(recipe: str, directory: Path, settings: Sequence[str]) -> float:
    """Run every component of a recipe in processes of their own, output to <directory>.log. Raises CaseFailed; returns CPU seconds."""
    log = directory.with_suffix(".log")
    command = [sys.executable, "-u", "-m", "aligner.cli", "launch", "local", recipe, *settings, f"run.directory={directory}"]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        usage, in_time = _await(process)
    finally:
        if process.returncode is None:  # this program is being ended: the run goes with it, with a checkpoint
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if not in_time:
        raise CaseFailed(f"did not end within {LIMIT_SECONDS:g} s: {log}")
    if process.returncode:
        raise CaseFailed(f"exit code {process.returncode}: {log}")
    return usage.ru_utime + usage.ru_stime


def refuse_foreign(root: Path, mark: str) -> bool:
    """Whether `root` has files and none is `mark`: it was not made by the program that asks, which has said so on stderr."""
    if root.exists() and any(root.iterdir()) and not (root / mark).exists():
        print(f"error: --directory {root} exists and was not made by this program; name another, or remove it", file=sys.stderr)
        return True
    return False


def prepare(root: Path, mark: str) -> None:
    """Make `root` and mark it; runs that follow use one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    root.mkdir(parents=True, exist_ok=True)
    (root / mark).touch()


def _await(process: subprocess.Popen) -> tuple[resource.struct_rusage, bool]:
    """What a process and its children used, and whether it ended within LIMIT_SECONDS; it is ended where it does not."""
    started, stops = (time.monotonic(), [(LIMIT_SECONDS, signal.SIGTERM), (LIMIT_SECONDS + GRACE_SECONDS, signal.SIGKILL)])
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage, len(stops) == 2
        if stops and time.monotonic() - started > stops[0][0]:
            process.send_signal(stops.pop(0)[1])  # the launcher ends its components when it is told to end
        time.sleep(0.1)
