"""SHA-256 of every file of a checkpoint: written with it, compared before it is loaded. The hashing is shared out over the ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from aligner.errors import CheckpointError, describe_os_error
from aligner.models.checkpoint import files
from aligner.parallel.collectives import from_rank_0, gather_objects

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """The expected size and SHA-256 of a file."""

    sha256: str
    size: int  # bytes


def digest(path: Path) -> Digest:
    sha256, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            size += count
    return Digest(sha256=sha256.hexdigest(), size=size)


def write(directory: Path, known: Mapping[str, Digest]) -> None:
    """Write the manifest of all files in a directory; `known` are the digests that other ranks computed, by relative path."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    entries = {name: asdict(known[name] if name in known else digest(directory / name)) for name in names}
    files.write_text(directory / files.MANIFEST, json.dumps(entries, indent=1) + "\n")


def read(directory: Path) -> dict[str, Digest]:
    """The manifest of a checkpoint. Raises CheckpointError where it, or the marker that vouches for it, is damaged."""
    path, expected = directory / files.MANIFEST, files.read_marker(directory)["manifest"]
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {files.MARKER}")
    return {name: Digest(**entry) for name, entry in json.loads(data).items()}


def verify(directory: Path, *, needed: Callable[[str], bool]) -> None:
    """Compare `needed` files with the manifest; collective, each rank hashes a share. Raises CheckpointError naming the damaged ones."""
    damaged = damage(directory, needed=needed)
    if not damaged:
        return
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    beside = from_rank_0(lambda: list(files.complete_steps(directory.parent).values()))
    older = beside[: beside.index(directory)] if directory in beside else []
    intact = next((path.name for path in reversed(older) if not damage(path, needed=lambda _: True)), None)
    mending = f"move {directory.name} away to continue from it, or let run.damaged_checkpoint=fall_back do it"
    advice = f"{intact} is intact: {mending}" if intact else "no older checkpoint beside it is intact"
    raise CheckpointError(f"{directory}: {damaged[0]}{more}; {advice}")


def damage(directory: Path, *, needed: Callable[[str], bool]) -> list[str]:
    """The faults of a checkpoint's needed files, the same on every rank. Every rank calls it."""
    manifest, broken = from_rank_0(lambda: _read_or_why_not(directory))
    if broken:
        return [broken]
    by_size = sorted((entry.size, name) for name, entry in manifest.items() if needed(name))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    own = [found for _, name in share if (found := _compare(directory / name, name, manifest[name]))]
    return sorted(found for part in gather_objects(own) for found in part)


def _read_or_why_not(directory: Path) -> tuple[dict[str, Digest], str]:
    try:
        return read(directory), ""
    except CheckpointError as error:
        return {}, str(error)
    except OSError as error:  # it may just have been set aside by the run's other component
        return {}, describe_os_error(error, directory)


def _compare(path: Path, name: str, expected: Digest) -> str:
    try:
        found = digest(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if found.size != expected.size:
        return f"{name} is damaged: it has {found.size} bytes, in {files.MANIFEST} {expected.size}"
    return "" if found == expected else f"{name} is damaged: its SHA-256 is not the one in {files.MANIFEST}"
