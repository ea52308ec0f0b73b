"""The files of checkpoints, without what is in them: names, publication, pointers, removal. No torch, no collectives: one process acts.

    <folder>/step_000030/          complete, and never changed again
    <folder>/.writing_step_...     not complete: nobody sees it, the next start of the run removes it
    <folder>/.removing_step_...    half removed; its partner in the other folder goes too
    <folder>/damaged_step_...      set aside: never resumed from, never removed
    <folder>/latest, best          the name of a step's directory

A directory gets its final name once every byte of it is on disk; `latest` moves after that. A removal renames the directory first. So a
kill at any moment leaves only complete checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError, describe_os_error

MARKER = "aligner.json"
MANIFEST = "manifest.json"
FINITE = "finite"  # in the marker: the numbers were looked at before they were written
FORMAT = 2
LATEST, BEST = "latest", "best"
WRITING, REMOVING, REPLACED = ".writing_", ".removing_", ".replaced_"
DAMAGED = "damaged_"
_STEP = re.compile(r"step_(\d{6,})")


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` is, or will be."""
    return checkpoints / f"step_{step:06d}"


def complete_steps(checkpoints: Path) -> dict[int, Path]:
    """The published checkpoints of a folder by step, oldest first; empty where the folder does not exist."""
    found = {int(match[1]): path for path in checkpoints.glob("step_*") if (match := _STEP.fullmatch(path.name)) and is_complete(path)}
    return dict(sorted(found.items()))


def is_complete(directory: Path) -> bool:
    return (directory / MARKER).exists()


def resolve(path: Path) -> Path:
    """The checkpoint that `path` is, or that it names as a pointer file, or `latest` in it names. Raises CheckpointError if none."""
    if is_complete(path):
        return path
    pointer = path if path.name in (LATEST, BEST) and path.is_file() else path / LATEST
    if pointer.exists():
        named = pointer.parent / pointer.read_text().strip()
        if not is_complete(named):
            raise CheckpointError(f"{pointer} names {named.name}, which is not a complete checkpoint")
        return named
    raise CheckpointError(f"{path}: no checkpoint here (neither {MARKER} nor {LATEST}{'' if path.exists() else '; no such directory'})")


def pointed_step(checkpoints: Path, pointer: str) -> int | None:
    """The step that a pointer file names; None if the file is missing or names no step."""
    try:
        match = _STEP.fullmatch((checkpoints / pointer).read_text().strip())
    except FileNotFoundError:
        return None
    return int(match[1]) if match else None


def point(checkpoints: Path, pointer: str, directory: Path) -> None:
    """Make the pointer file name `directory`, atomically."""
    new = checkpoints / f".{pointer}"
    write_text(new, directory.name + "\n")
    new.replace(checkpoints / pointer)
    sync_directory(checkpoints)


def write_marker(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the file that makes a checkpoint complete; it carries the digests of the manifest and of itself."""
    manifest = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    write_text(directory / MARKER, _sealed({"format": FORMAT, **content, "manifest": manifest}))


def read_marker(directory: Path) -> dict[str, Any]:
    """The content of the marker. Raises CheckpointError for a damaged one, or a format that this version does not read."""
    path = directory / MARKER
    text = path.read_bytes().decode(errors="replace")
    try:
        marker = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        found = marker.get("format") if isinstance(marker, dict) else None
        raise CheckpointError(f"{path}: format {found}; this version reads {FORMAT}")
    if text != _sealed({key: value for key, value in marker.items() if key != "checksum"}):
        raise CheckpointError(f"{path} is damaged: it does not have its own checksum")
    return marker


def is_sound(directory: Path) -> bool:
    """Whether a checkpoint is known to be finite and has all of its files in their sizes (their contents are not read)."""
    try:
        marker = read_marker(directory)
        manifest = (directory / MANIFEST).read_bytes()
        if not marker.get(FINITE) or hashlib.sha256(manifest).hexdigest() != marker["manifest"]:
            return False
        return all((directory / name).stat().st_size == entry["size"] for name, entry in json.loads(manifest).items())
    except (OSError, CheckpointError):
        return False


def new_writing_directory(final: Path) -> Path:
    """A fresh directory for the checkpoint `final`; of a new name, since a process of a killed run may still write into the last one."""
    writing = final.parent / f"{WRITING}{final.name}.{secrets.token_hex(4)}"
    writing.mkdir(parents=True)
    return writing


def publish(writing: Path, final: Path) -> None:
    """Give a complete directory its final name and move `latest`. An older checkpoint of that name is then removed."""
    for directory in (*(path for path in writing.iterdir() if path.is_dir()), writing):
        sync_directory(directory)
    replaced = final.parent / f"{REPLACED}{final.name}.{secrets.token_hex(4)}"
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    sync_directory(final.parent)
    point(final.parent, LATEST, final)
    discard(replaced)


def remove_step(folders: Sequence[Path], step: int) -> None:
    """Remove the checkpoints of one step from all folders, renaming them first. `clean` completes an interrupted removal."""
    hidden = [folder / f"{REMOVING}{step_directory(folder, step).name}" for folder in folders]
    for folder, gone in zip(folders, hidden, strict=True):
        if (path := step_directory(folder, step)).exists():
            discard(gone)
            path.rename(gone)
    for gone in reversed(hidden):  # the first one stays till the end: it marks its partners for removal
        discard(gone)


def set_aside(directory: Path) -> None:
    """Rename a damaged checkpoint so that nothing loads it, and point `latest` at the newest left. Actor and critic may do it at once."""
    folder = directory.parent
    names = (f"{DAMAGED}{directory.name}{number}" for number in ("", *(f".{n}" for n in range(2, 1000))))
    aside = next(folder / name for name in names if not (folder / name).exists())
    with contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
    sync_directory(folder)
    left = complete_steps(folder)
    if left and (pointed := pointed_step(folder, LATEST)) is not None and pointed not in left:
        point(folder, LATEST, left[max(left)])


def clean(folders: Sequence[Path]) -> None:
    """Remove a killed run's leftovers from the first folder and complete its removals in all folders. Nobody else may be writing there.

    A checkpoint that was being replaced, and has no successor yet, gets its name back.
    """
    own = folders[0]
    for path in own.glob(f"{REPLACED}step_*"):
        final = own / path.name.removeprefix(REPLACED).partition(".")[0]
        if not final.exists():  # killed before its successor had the name
            path.rename(final)
    for pattern in (f"{WRITING}*", f"{REPLACED}*"):
        for path in own.glob(pattern):
            discard(path)
    for path in own.glob(f"{REMOVING}step_*"):
        if match := _STEP.fullmatch(path.name.removeprefix(REMOVING)):
            remove_step(folders, int(match[1]))


def discard(path: Path) -> None:
    """Remove an unreferenced directory. Files that cannot be removed now (file-system errors) stay until the next `clean`."""
    shutil.rmtree(path, ignore_errors=True)


def steps_to_remove(complete: Sequence[int], paired: Sequence[int], *, keep: int, protected: set[int]) -> list[int]:
    """The steps of a folder to remove: not among the newest `keep` pairs, not protected, older than the newest pair.

    `paired` are the steps that every folder has, ascending. `keep` 0 removes nothing.
    """
    if not keep or not paired:
        return []
    stay = protected | set(paired[-keep:])
    return [step for step in complete if step not in stay and step < paired[-1]]


def write_text(path: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sealed(content: Mapping[str, Any]) -> str:
    """The canonical text of this content, with a checksum that detects any changed byte."""
    text = json.dumps(dict(sorted(content.items())))
    return json.dumps({**json.loads(text), "checksum": hashlib.sha256(text.encode()).hexdigest()}) + "\n"


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
    except OSError:  # the file system is gone: the first error tells more
        return text


def size_text(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"
