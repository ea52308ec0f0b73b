"""The files of a directory or of an archive (`.nemo`: a tar, perhaps compressed with gzip), which is read in place."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any

from aligner.errors import CheckpointError, describe_os_error

_GZIP = b"\x1f\x8b"


class Files:
    """Read-only files by their names relative to a root, with slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def names(self) -> list[str]:
        """Of all files, sorted."""
        found = (Path(folder, name) for folder, _, names in os.walk(self.root) for name in names)
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def open(self, name: str) -> IO[bytes]:
        """A seekable file. Raises CheckpointError where there is none."""
        try:
            return (self.root / name).open("rb")
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.where(name)} is missing") from error
        except OSError as error:
            raise CheckpointError(describe_os_error(error, self.where(name))) from error

    def read(self, name: str, *, offset: int = 0, length: int = -1) -> bytes:
        """The bytes of a file, or `length` of them from `offset` on. Raises CheckpointError where it has fewer."""
        with self.open(name) as file:
            try:
                file.seek(offset)
                data = file.read(length)
            except (OSError, tarfile.TarError, ValueError) as error:
                raise CheckpointError(f"{self.where(name)}: cannot be read: {error}") from error
        if len(data) < length:
            raise CheckpointError(f"{self.where(name)} is cut short: bytes {offset} to {offset + length} are not all there")
        return data

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file. Raises CheckpointError where it is missing or damaged."""
        try:
            content = json.loads(self.read(name))
        except ValueError as error:
            raise CheckpointError(f"{self.where(name)} is damaged: no JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.where(name)} is damaged: a JSON {type(content).__name__}, expected an object")
        return content

    def where(self, name: str) -> str:
        """What messages call a file."""
        return str(self.root / name)


class Archive(Files):
    """The files of a tar. One that is compressed is unpacked into an unnamed temporary file (TMPDIR) first.

    Raises CheckpointError for a file that is no tar, and for members that are no plain files or lead out of it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = _open(path)
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115 - closed with the archive
            self._members = {_name(path, member): member for member in self._tar if not member.isdir()}
        except (tarfile.TarError, OSError, ValueError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: is no NeMo archive, or damaged: {error}") from error
        except CheckpointError:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._file.close()

    def names(self) -> list[str]:
        return sorted(self._members)

    def open(self, name: str) -> IO[bytes]:
        found = self._tar.extractfile(self._members[name]) if name in self._members else None
        if found is None:
            raise CheckpointError(f"{self.root}: has no {name}")
        return found

    def where(self, name: str) -> str:
        return f"{self.root}: {name}"


def _open(path: Path) -> IO[bytes]:
    """The uncompressed bytes of an archive."""
    try:
        file = path.open("rb")
        if file.read(2) != _GZIP:
            file.seek(0)
            return file
        with file, gzip.open(path) as packed:
            unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the archive
            shutil.copyfileobj(packed, unpacked, 16 << 20)
    except (OSError, EOFError, zlib.error) as error:
        what = describe_os_error(error, f"{path}, unpacked into {tempfile.gettempdir()}") if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read: {what}") from error
    unpacked.seek(0)
    return unpacked


def _name(path: Path, member: tarfile.TarInfo) -> str:
    name = PurePosixPath(member.name)
    if not member.isdir() and (not member.isreg() or member.issparse()):
        raise CheckpointError(f"{path}: {member.name!r} is a link or a special file; allowed: plain files and directories")
    if name.is_absolute() or ".." in name.parts:
        raise CheckpointError(f"{path}: {member.name!r} leads out of the archive")
    return name.as_posix()
