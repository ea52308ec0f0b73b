"""Files that are either not there or complete; what comes with the package."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any


def checkout() -> Path | None:
    """The directory of the source code that this package runs from; None if it was installed from a wheel."""
    home = Path(__file__).resolve().parent.parent
    return home if (home / "conf").is_dir() and (home / "setup.py").is_file() else None


def shipped(folder: str) -> Path:
    """`conf`, `examples` or `slurm` of the checkout, or the copy of it that a wheel holds."""
    return (checkout() or Path(__file__).resolve().parent) / folder


def conf_directory() -> Path:
    """The configs and presets that come with the package."""
    return shipped("conf")


def recipe_folders() -> list[Path]:
    """The folders of the recipes in conf/: each holds the recipe's own config, which has the folder's name."""
    return sorted(file.parent for file in conf_directory().glob("*/*.yaml") if file.stem == file.parent.name)


def configs() -> list[str]:
    """The names of all configs of conf/."""
    return sorted(file.stem for folder in recipe_folders() for file in folder.glob("*.yaml"))


def is_plain_name(name: str) -> bool:
    """Whether `name`, which a downloaded file says, is that of a file in its own folder: no path, and nothing that no file is called."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


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
