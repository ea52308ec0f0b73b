"""Is the run directory shared by all ranks, correct, and how fast is it?"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster.run_directory import RunDirectory
from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.errors import LaunchError

LATE_SECONDS = 2.0  # a file that another node wrote should be seen sooner: heartbeats and registrations are such files
SAMPLE_BYTES = 16 << 20
_POLL_SECONDS = 0.01
_CLEAN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """One node's view of the run directory."""

    seen_after_seconds: float  # from another node's rename to the file's being visible here
    write_seconds: float  # small file: write, fsync, rename
    rate: float  # bytes per second of one large file with fsync, all nodes at once
    locks_hold: bool  # a lock that another node holds is refused here


def _observe(context: Context) -> Files:
    allocation = context.allocation
    folder, problem = _prepare(context) if allocation.rank == 0 else (Path(), "")
    leaders = allocation.leaders()
    if problem:
        raise LaunchError(problem)
    if allocation.rank == 0:
        allocation.put("folder", str(folder))
    folder = Path(str(allocation.get("folder", deadline=allocation.deadline, what="rank 0 to make the run directory")))
    try:
        return _try_out(context, folder, leaders)
    finally:
        allocation.put(f"finished/{allocation.rank}", True)
        if allocation.rank == 0:
            _clean(context, folder, leaders)


def _prepare(context: Context) -> tuple[Path, str]:
    """The trial folder inside the run directory, and the error if it cannot be made."""
    run = RunDirectory(Path(context.config.run.directory))
    try:
        folder = run.create().path / f".preflight.{secrets.token_hex(4)}"
        folder.mkdir()
    except OSError as error:
        return Path(), f"run.directory={run.path}: {error}"
    return folder, ""


def _try_out(context: Context, folder: Path, leaders: list[int]) -> Files:
    allocation = context.allocation
    run = Path(context.config.run.directory).expanduser().absolute()
    if not run.is_dir() or not _appears(folder, allocation.deadline):
        raise LaunchError(f"{folder} is not there, though rank 0 on {allocation.node_of(0)} made it: {run} is not shared")
    holder = _lock(folder / "lock") if allocation.rank == 0 else None
    own = folder / f"of_{allocation.rank}"
    write_seconds = _write(own, str(allocation.rank))
    allocation.put(f"written/{allocation.rank}", True)
    other = leaders[(leaders.index(allocation.rank) + 1) % len(leaders)]
    allocation.get(f"written/{other}", deadline=allocation.deadline, what=f"rank {other} on {allocation.node_of(other)} to write")
    started = time.monotonic()
    if not _appears(folder / f"of_{other}", allocation.deadline):
        raise LaunchError(
            f"the file that rank {other} on {allocation.node_of(other)} wrote to {folder} is not seen here: not the same file system"
        )
    seen_after = time.monotonic() - started
    text = (folder / f"of_{other}").read_text()
    if text != str(other):
        raise LaunchError(f"the file of rank {other} in {folder} reads {text!r}: a rename is not atomic here")
    _link(own, folder / f"link_{allocation.rank}")
    locks_hold = True
    if allocation.rank != 0:
        allocation.get("written/0", deadline=allocation.deadline, what="rank 0 to lock a file")
        locks_hold = _is_locked(folder / "lock", allocation.deadline)
    allocation.put(f"tried/{allocation.rank}", True)
    for rank in leaders:
        allocation.get(f"tried/{rank}", deadline=allocation.deadline, what=f"rank {rank} on {allocation.node_of(rank)} to try the files")
    if holder is not None:
        os.close(holder)
    return Files(
        seen_after_seconds=seen_after, write_seconds=write_seconds, rate=_rate(folder / f"large_{allocation.rank}"), locks_hold=locks_hold
    )


def _appears(path: Path, deadline: float) -> bool:
    """Whether the path becomes visible in time. Lists its folder, which refreshes the caches of network file systems."""
    while not (path.exists() or path.name in os.listdir(path.parent)):
        if time.monotonic() > deadline - 1.0:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _write(path: Path, text: str) -> float:
    """Seconds to replace a file as the registry and the checkpoints do. Done twice: the second write replaces a file."""
    for attempt in ("damaged", text):
        started = time.monotonic()
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(attempt)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return time.monotonic() - started


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError as error:
        raise LaunchError(f"{name.parent}: a hard link cannot be made ({error}); a run needs a file system that has them") from error


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_locked(path: Path, deadline: float) -> bool:
    if not _appears(path, deadline):
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # that is what was hoped for
    finally:
        os.close(descriptor)
    return False


def _rate(path: Path) -> float:
    data = os.urandom(1 << 20)
    started = time.monotonic()
    with path.open("wb") as file:
        for _ in range(SAMPLE_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return SAMPLE_BYTES / (time.monotonic() - started)


def _clean(context: Context, folder: Path, leaders: list[int]) -> None:
    allocation, deadline = context.allocation, time.monotonic() + _CLEAN_SECONDS
    try:
        for rank in leaders:
            allocation.get(f"finished/{rank}", deadline=deadline, what=f"rank {rank} to leave {folder}", heeds_failure=False)
    except LaunchError:
        pass  # it is dead or hangs, which its missing answer says; what it has open there may stay behind
    shutil.rmtree(folder, ignore_errors=True)  # a network file system may still show a name that is gone


def judge(context: Context, seen: Mapping[int, Files]) -> Finding:
    """Warning if other nodes' files appear late, or locks do not hold."""
    slowest = max(seen, key=lambda rank: seen[rank].seen_after_seconds)
    total = sum(files.rate for files in seen.values())
    write = max(files.write_seconds for files in seen.values())
    figures = {"seen_after_seconds": seen[slowest].seen_after_seconds, "write_seconds": write, "bytes_per_second": total}
    nodes = "1 node writes" if len(seen) == 1 else f"{len(seen)} nodes write"
    where = Path(context.config.run.directory).expanduser().absolute()
    found = f"{where}: {nodes} {total / 1e6:.0f} MB/s, a small file takes {write * 1e3:.0f} ms"
    if len(seen) > 1:
        found += f", others see it after {seen[slowest].seen_after_seconds * 1e3:.0f} ms"
    if seen[slowest].seen_after_seconds > LATE_SECONDS:
        advice = (
            "heartbeats are files: raise server_client.heartbeat_timeout_seconds well above this, or mount with shorter attribute caching"
        )
        return Finding(level=Level.warning, found=f"{found} ({context.allocation.node_of(slowest)})", advice=advice, figures=figures)
    if without := [rank for rank, files in seen.items() if not files.locks_hold]:
        found += f"; {who(context.allocation, without)}: got a lock that rank 0 holds"
        advice = "mount with locks across nodes (Lustre: -o flock) where reward functions or data sets need them"
        return Finding(level=Level.warning, found=found, advice=advice, figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


FILESYSTEM = Item(
    "filesystem",
    Where.every_node,
    _observe,
    judge,
    timeout_seconds=90.0,
    needs=("config",),
    advice="give a run.directory on a file system that all nodes mount and that is yours",
)
