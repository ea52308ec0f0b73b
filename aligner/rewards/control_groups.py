"""A control group (cgroup v2) for each sandboxed program, where some were delegated to this run: one limit for all processes of a program.

It is the kernel's own count, which nothing passes: the pages of all processes together, the directory in memory, pipes, page tables.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = {"memory", "pids"}
NAME = "aligner-sandbox-"
EMPTYING_SECONDS = 5.0  # for processes that were killed


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One program's: `procs`, a descriptor through which a process joins by writing 0, and where its counts are."""

    path: Path
    procs: int

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process of it for lack of memory."""
        counts = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return counts.get("oom_kill", "0") != "0"


def delegated_place(process: Path = Path("/proc/self")) -> Path | None:
    """Where this process may make groups with limits: below its own group, or beside it if the group above is delegated too. None: nowhere.

    Not farther up: limits that a job or service has for the run hold for its programs too.
    """
    own = _own_group(process)
    if own is None:
        return None
    return next((place for place in (own, own.parent) if _may_divide(place, is_own=place == own)), None)


def _own_group(process: Path) -> Path | None:
    path = next((line[3:] for line in (process / "cgroup").read_text().splitlines() if line.startswith("0::")), "")
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        root, mounted = fields.split()[3:5]
        if kind.startswith("cgroup2 ") and (path + "/").startswith(root.rstrip("/") + "/"):
            return Path(mounted) / path[len(root) :].lstrip("/")
    return None


def _may_divide(place: Path, *, is_own: bool) -> bool:
    """Whether this user may make groups with limits there; turns the controllers on for them if need be."""
    try:
        if not all(os.access(place / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control")):
            return False
        if os.geteuid() == 0 and not is_own and not _is_delegated(place):  # root may write everywhere
            return False
        switches = place / "cgroup.subtree_control"
        if not set(switches.read_text().split()) >= CONTROLLERS:
            switches.write_text(" ".join(f"+{name}" for name in sorted(CONTROLLERS)))
        return True
    except OSError:  # a group that has processes itself, or controllers that are not there
        return False


def _is_delegated(place: Path) -> bool:
    """As systemd marks what it has given away."""
    return any(name in ("user.delegate", "trusted.delegate") for name in os.listxattr(place))


@contextlib.contextmanager
def control_group(place: Path, *, memory_bytes: int, processes: int) -> Iterator[ControlGroup]:
    """A new group at `place` with these limits, no swap; at the end its processes are killed and it is removed. Raises OSError."""
    path = place / f"{NAME}{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes}
        for name, value in limits.items():
            if name != "memory.swap.max" or (path / name).exists():  # a kernel without swap has no limit for it
                (path / name).write_text(str(value))
        procs = os.open(path / "cgroup.procs", os.O_WRONLY)
        try:
            yield ControlGroup(path, procs)
        finally:
            os.close(procs)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    kill = path / "cgroup.kill"  # Linux 5.14; what the program started has been ended before in any case
    if kill.exists():
        kill.write_text("1")
    deadline = time.monotonic() + EMPTYING_SECONDS
    while True:
        try:
            return path.rmdir()
        except OSError:  # busy until the last process is gone
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
