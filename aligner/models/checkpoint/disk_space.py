"""Free space on file systems: checked before a write, and reported when a write fails.

A file system's free space does not reflect quotas; an exhausted quota shows only as a write error.
"""

from __future__ import annotations

import os
from pathlib import Path

from aligner.errors import CheckpointError, describe_os_error

GIB = 2**30


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write there; the directory need not exist yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def check_room(directory: Path, needed: int) -> None:
    """Raise CheckpointError where the file system has less than `needed` bytes left. One rank calls it."""
    free = free_bytes(directory)
    if free < needed:
        raise CheckpointError(
            f"{directory}: a checkpoint of {size_text(needed)} does not fit, {size_text(free)} are free there; "
            "the checkpoints before it stay. Make room, or lower checkpoint.keep"
        )


def explain(error: Exception, directory: Path) -> str:
    """The cause of a failed write, with the free space: torch wraps the system's error, or leaves it out."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    text = describe_os_error(cause, directory) if isinstance(cause, OSError) else f"{directory}: {error}"
    try:
        return f"{text}; {size_text(free_bytes(directory))} are free there"
    except OSError:  # the file system is gone: the first error says more
        return text


def size_text(number: int) -> str:
    """A number of bytes for people."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"
