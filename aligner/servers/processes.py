"""Information from /proc about this machine's processes. Linux only, standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def node_identity() -> str:
    """Names this boot of this machine and this process-id namespace: two processes with equal identities can see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process or it is a zombie.

    With the pid it names one process for good, although pids are reused.
    """
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19])


def parent(pid: int) -> int | None:
    """The parent's pid; None if there is no such process."""
    stat = _stat(pid)
    return None if stat is None else int(stat[1])


def zombie_children(pid: int) -> list[int]:
    """Children of `pid` that have ended but not been reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(PermissionError):  # another user's, where /proc is mounted with hidepid=1
            stat = _stat(int(entry.name)) if entry.name.isdigit() else None
            if stat is not None and stat[0] == "Z" and int(stat[1]) == pid:
                found.append(int(entry.name))
    return found


def processes_with_variable(assignment: str) -> dict[int, str]:
    """Pid and command line of every process whose initial environment holds `NAME=value` (any, for ''), except this process."""
    wanted = assignment.encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone since the listing, or another user's: not one of ours
    return {pid: command for pid, command in found.items() if start_ticks(pid) is not None}


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: state, parent, ..."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()  # the name, which is before, may hold spaces and brackets
