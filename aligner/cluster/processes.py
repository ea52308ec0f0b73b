"""Linux processes for the local launcher: start one that dies with its parent, find and end all of a run. Standard library only.

Every process of a run inherits a random marker in its environment, `ALIGNER_LAUNCHER_ID`, and so can be found in /proc even after it left
its process group (setsid) or lost its parent (double fork). The kernel's parent-death signal reaches only direct children.

Also a script (`python -I -S processes.py exec|guard ...`), so that a start costs 20 ms without this package's imports:

    exec PARENT COMMAND...   ask the kernel for SIGTERM when the parent dies, then become COMMAND
    guard MARKER SECONDS     wait until stdin closes (the launcher ended, perhaps by kill -9), then end processes with the marker
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

MARKER_VARIABLE = "ALIGNER_LAUNCHER_ID"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
_KILL_WAIT_SECONDS = 5.0


def _carries(pid: int, marker: str) -> bool:
    try:
        return bool(marker) and marker.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's: not ours
        return False


def find(marker: str, sessions: Collection[int] = ()) -> set[int]:
    """Living processes with `marker` (if any), of one of `sessions`, or descended from such; never the caller."""
    parents, found = {}, set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        state, parent, _group, session = stat.rpartition(")")[2].split()[:4]  # the name before may hold spaces and brackets
        if state not in "ZX":
            parents[pid] = int(parent)
            found |= {pid} if int(session) in sessions or _carries(pid, marker) else set()
    added = found
    while added:
        added = {pid for pid, parent in parents.items() if parent in added} - found
        found = found | added
    return found - {os.getpid()}


def send(pids: Collection[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # ended between the look and the signal: what was wanted
            os.kill(pid, number)


def _wait_until_gone(search: Callable[[], set[int]], seconds: float, pause: Callable[[float], None]) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := search()) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    return left


def end(search: Callable[[], set[int]], seconds: float, pause: Callable[[float], None]) -> set[int]:
    """SIGTERM to what `search` finds, SIGKILL after `seconds`; returns survivors. `pause` drains pipes, so no write hangs."""
    send(search(), signal.SIGTERM)
    if not _wait_until_gone(search, seconds, pause):
        return set()
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while (left := search()) and time.monotonic() < deadline:  # again and again: a fork may race with one round
        send(left, signal.SIGKILL)
        pause(_POLL_SECONDS)
    return left


def exec_command(command: list[str]) -> list[str]:
    """Wrap a command so that it gets SIGTERM when the calling process dies (for the kernel, the calling thread, which must live on)."""
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), "exec", str(os.getpid()), *command]


def guard_command(marker: str, seconds: float) -> list[str]:
    """The guard's command line; its stdin is a pipe whose other end only the launcher holds."""
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), "guard", marker, str(seconds)]


def _exec(parent: int, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        number = ctypes.get_errno()
        print(f"cannot ask for the parent-death signal: {os.strerror(number)}", file=sys.stderr)
        return 126
    if os.getppid() != parent:  # the launcher died before the request was in place
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and an ignored signal stays ignored across exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _guard(marker: str, seconds: float) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends the launcher must not end its guard first
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    # The ranks got SIGTERM from the kernel at this moment and may be saving: no second SIGTERM before their time is over.
    left = _wait_until_gone(lambda: find(marker), seconds, time.sleep)
    if left:
        print(f"[guard] the launcher ended without stopping processes {sorted(left)}: ending them", flush=True)
        left = end(lambda: find(marker), 1.0, time.sleep)
    return 1 if left else 0


if __name__ == "__main__":
    mode, first, *rest = sys.argv[1:]
    if mode not in ("exec", "guard"):
        raise SystemExit(f"unknown mode {mode!r}; allowed: exec, guard")
    sys.exit(_exec(int(first), rest) if mode == "exec" else _guard(first, float(rest[0])))
