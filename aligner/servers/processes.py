"""This machine's processes, from /proc; signals that end this one in order; and, run as a script in a separate session, the watchdog that
removes a server's leftovers.

Linux and standard library only. The watchdog's standard input is a pipe that only the server holds. When the server closes it or dies,
SIGKILL included, the watchdog kills every process with the server's environment marker (tritonserver and its Python stubs), and removes its
shared memory and its workspace. If a machine kills both, this user's next server there removes the workspace (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def recorded_signals(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Meanwhile these signals are added to the list, which the caller looks at, instead of ending the process. From the main thread."""
    received: list[int] = []
    previous = {number: signal.signal(number, lambda got, frame: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def node_identity() -> str:
    """Names this boot of this machine and this process-id namespace: two processes with equal identities can see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names one process for good. None if it is gone or a zombie."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19])


def parent(pid: int) -> int | None:
    """The parent's pid; None if no such process exists."""
    stat = _stat(pid)
    return None if stat is None else int(stat[1])


def zombie_children(pid: int) -> list[int]:
    """Children of `pid` that have ended but not been reaped."""
    found = []
    for child in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(PermissionError):  # another user's, if /proc is mounted with hidepid=1
            stat = _stat(child)
            if stat is not None and stat[0] == "Z" and int(stat[1]) == pid:
                found.append(child)
    return found


def processes_with_variable(assignment: str) -> dict[int, str]:
    """Pid and command line of every process whose initial environment holds `NAME=value` (any, for ''), except this process."""
    found = {}
    for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}:
        place = Path(f"/proc/{pid}")
        # Gone since the listing, or another user's: not one of ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if assignment.encode() in (place / "environ").read_bytes().split(b"\0"):
                found[pid] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: command for pid, command in found.items() if start_ticks(pid) is not None}


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: state, parent, ..."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()  # the name, which is before, may hold spaces and brackets


PREFIX = "aligner-triton-"  # of workspaces
BACKEND = Path("/tmp"), "python_env_*"  # where Triton's Python backend makes a folder for itself, whatever TMPDIR is
OWNER = "owner"  # in each: the server's pid and when it started, in a file that it holds locked as long as it lives
TRACKER_SECONDS = 3.0  # multiprocessing's resource trackers unlink shared memory and exit by themselves
KILL_SECONDS = 10.0


def own(workspace: Path) -> int:
    """Mark a workspace as this process's; the descriptor that holds the lock."""
    descriptor = os.open(workspace / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"{os.getpid()} {start_ticks(os.getpid())}".encode())
    return descriptor


def sweep(temporary: Path) -> list[Path]:
    """Remove what servers of this user left in `temporary` if they ended without their watchdog; returns those workspaces."""
    swept = []
    for workspace in temporary.glob(f"{PREFIX}*"):
        try:
            place = workspace.lstat()
            if not stat.S_ISDIR(place.st_mode) or place.st_uid != os.getuid():
                continue  # another user may have made it, with anything in it, such as a FIFO that nobody writes to
            descriptor = os.open(workspace / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # just being made, or gone by now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if len(owner := os.read(descriptor, 64).split()) == 2 and all(part.isdigit() for part in owner):
                remove(workspace, *map(int, owner))
                swept.append(workspace)
        except BlockingIOError:  # its server lives
            continue
        finally:
            os.close(descriptor)
    return swept


def remove(workspace: Path, pid: int, started: int) -> None:
    """Remove the workspace and the shared memory of the server `pid`, which started at that tick and has ended or is about to."""
    shutil.rmtree(workspace, ignore_errors=True)
    later = start_ticks(pid)  # the number may be another process's by now, and later memory its own
    began = time.time() if later in (None, started) else _time_of(later)
    for segment in Path("/dev/shm").glob(f"pytrtion{pid}-*"):  # PyTriton's own spelling
        with contextlib.suppress(FileNotFoundError, PermissionError):  # gone by now, or a server's of another user with the same number
            if segment.stat().st_mtime < began:
                segment.unlink()
    # A Triton that was killed leaves its own empty: here those of this user that are older than every Triton that lives.
    living = [start_ticks(pid) or 0 for pid, command in processes_with_variable("").items() if "tritonserver" in command]
    before = _time_of(min(living)) if living else time.time()
    for folder in BACKEND[0].glob(BACKEND[1]):
        with contextlib.suppress(OSError):  # gone by now, or not empty
            if (place := folder.lstat()).st_uid == os.getuid() and place.st_mtime < before:
                folder.rmdir()


def _time_of(ticks: int) -> float:
    """Unix time of ticks since boot, less a second: file systems date by a clock that lags by milliseconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK") - 1.0


def kill_marked(assignment: str) -> None:
    """Kill all marked processes; the resource trackers last."""
    started = time.monotonic()
    while found := processes_with_variable(assignment):
        waited = time.monotonic() - started
        if waited > KILL_SECONDS:
            print(f"watchdog: could not kill {found} in {KILL_SECONDS:.0f} s", file=sys.stderr, flush=True)
            return
        for pid, command in found.items():
            if "resource_tracker" not in command or waited > TRACKER_SECONDS:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself between the listing and the signal
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    """argv: the server's pid, NAME=value that marks its processes, its workspace."""
    parent, assignment, workspace = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    started = start_ticks(parent) or 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the server; only its end counts here
    while os.getppid() == parent:  # until the parent changes or standard input ends (another process may have inherited the pipe)
        if select.select([sys.stdin], [], [], 0.5)[0] and not os.read(sys.stdin.fileno(), 4096):
            break
    kill_marked(assignment)
    remove(workspace, parent, started)


if __name__ == "__main__":
    main()
