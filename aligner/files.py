"""Files that are either absent or complete; files that ship with the package."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any


def checkout() -> Path | None:
    """The directory of the source code that this package runs from; None if it was installed from a wheel."""
    home = Path(__file__).resolve().parent.parent
    return home if (home / "conf").is_dir() and (home / "setup.py").is_file() else None


def shipped(folder: str) -> Path:
    """`conf`, `examples` or `slurm` of the checkout, or the copy of it that a wheel holds."""
    return (checkout() or Path(__file__).resolve().parent) / folder


def conf_directory() -> Path:
    """The configs and presets that ship with the package."""
    return shipped("conf")


def recipe_folders() -> list[Path]:
    """The folders of the recipes in conf/: each holds the recipe's own config, which has the folder's name."""
    return sorted(file.parent for file in conf_directory().glob("*/*.yaml") if file.stem == file.parent.name)


def configs() -> list[str]:
    """The names of all configs of conf/."""
    return sorted(file.stem for folder in recipe_folders() for file in folder.glob("*.yaml"))


def is_plain_name(name: str) -> bool:
    """Whether `name`, from a downloaded file, names a file in that file's own folder: not a path, and a possible name."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def own_directory(prefix: str) -> TemporaryDirectory[str]:
    """As TemporaryDirectory, locked while this process lives; what processes of this host that were killed left is removed first.

    Without a lock, which a file system may not have (Lustre without the mount option `flock`), nothing is ever removed there.
    """
    prefix += f"{socket.gethostname()}-"  # locks may be of one host alone
    for left in Path(gettempdir()).glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # another user's, or gone, or of a process that lives
            lock = os.open(left, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    while True:
        directory = TemporaryDirectory(prefix=prefix)
        with contextlib.suppress(FileNotFoundError):  # another process has found it before it was locked
            lock = os.open(directory.name, os.O_RDONLY)  # until the process ends
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.stat(directory.name)
            return directory


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a new file, which gets its name `path` once all of it is on disk, in place of an older one. For one writer at a time.

    Raises what `write` raises, and OSError; nothing of the new file is left then.
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


def publish_first(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a new file `path`. Nobody sees half of it, and of several processes the first one wins. Raises OSError."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[float], object], poll_seconds: float = 1.0) -> Iterator[None]:
    """Hold the lock file `path`: one process of this machine at a time.

    `waiting` is called at every poll with the seconds waited so far, and may raise. On a file system without locks nobody waits.
    """
    import filelock  # only what shares a cache needs it

    lock, begun = filelock.FileLock(path), time.monotonic()
    while True:
        try:
            lock.acquire(timeout=poll_seconds, poll_interval=0.05)
            break
        except filelock.Timeout:
            waiting(time.monotonic() - begun)
        except NotImplementedError:
            yield
            return
    try:
        yield
    finally:
        lock.release()


def with_umask_mode(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a file, which then has the mode of any new one. The writer of safetensors makes files that their owner alone may read."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    write(path)
    path.chmod(mode)


def with_shipped_paths(value: Any) -> Any:
    """The value; for a path `examples/...`, also `examples/...py:name`, that is not below this directory, the package's own."""
    if isinstance(value, list):
        return [with_shipped_paths(one) for one in value]
    if isinstance(value, dict):
        return {name: with_shipped_paths(one) for name, one in value.items()}
    if not isinstance(value, str) or not value.startswith("examples/"):
        return value
    path, colon, name = value.partition(":")
    own = shipped("examples").parent / path
    return f"{own}{colon}{name}" if not Path(path).exists() and own.exists() else value
