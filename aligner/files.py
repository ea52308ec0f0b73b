"""Files that are either not there or complete; where the package keeps its configs."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path


def conf_directory() -> Path:
    """conf/ of the checkout, or the copy that a built package holds."""
    package = Path(__file__).resolve().parent
    return next((path for path in (package.parent / "conf", package / "conf") if path.is_dir()), package.parent / "conf")


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a new file, which gets its name `path` once all of it is on disk; a file of that name is replaced.

    For files with one writer at a time. Raises what `write` raises, and OSError; nothing of the new file is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        with new.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(new, path)
    except Exception:
        with contextlib.suppress(OSError):  # the first error counts
            new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def as_umask_says(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a file, which then has the mode of any new one. The writer of safetensors makes files that their owner alone may read."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    write(path)
    path.chmod(mode)
