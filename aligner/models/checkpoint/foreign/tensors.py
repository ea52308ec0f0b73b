"""The files of a directory or of an archive (`.nemo`: a tar, perhaps compressed with gzip), which is read in place, and their tensors."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from aligner.errors import CheckpointError, describe_os_error
from aligner.files import is_plain_name
from aligner.models.checkpoint import safe_pickle
from aligner.models.checkpoint.hf_files import json_object

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
        """A seekable file. Raises CheckpointError if it is missing."""
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
        return json_object(self.read(name), self.where(name))

    def where(self, name: str) -> str:
        """What messages call a file."""
        return str(self.root / name)


class Archive(Files):
    """The files of a tar. One that is compressed is unpacked into an unnamed temporary file (TMPDIR) first.

    Raises CheckpointError for a file that is not a tar, and for members that are not plain files or lead out of it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = _open(path)
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115 - closed with the archive
            self._members = {_name(path, member): member for member in self._tar if not member.isdir()}
        except (tarfile.TarError, OSError, ValueError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: not a NeMo archive, or damaged: {error}") from error
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


_METADATA = ".metadata"
_COMMON_STATE = "common_state/shard_0_1"  # in place of common.pt since Megatron-Core 0.19


class TorchDist:
    """The tensors in a folder, whole or by their first indices. Raises CheckpointError naming the file that is damaged."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, PurePosixPath(folder)
        self.where = files.where(self._name(_METADATA))
        with files.open(self._name(_METADATA)) as file:
            metadata = safe_pickle.read_metadata(file, self.where)
        self._entries, self._storage = metadata.state_dict_metadata, metadata.storage_data

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.size) for name, entry in self._entries.items() if isinstance(entry, TensorStorageMetadata)}

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].properties.dtype

    def read(self, name: str, index: tuple[int, ...]) -> Tensor:
        """`tensor[index]`."""
        entry = self._entries[name]
        depth, shape = len(index), entry.size[len(index) :]
        whole, found = torch.empty(shape, dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            inside = [at - offset for at, offset in zip(index, chunk.offsets, strict=False)]
            if not all(0 <= at < size for at, size in zip(inside, chunk.sizes, strict=False)):
                continue
            stored, source = self._stored(MetadataIndex(name, chunk.offsets))
            data = safe_pickle.load_as_data(io.BytesIO(stored), f"{source}: {name}")
            if not isinstance(data, Tensor):
                raise CheckpointError(f"{source}: {name} is not a tensor")
            if data.shape != chunk.sizes or data.dtype != whole.dtype:
                raise CheckpointError(f"{self.where}: {name} is {tuple(data.shape)} {data.dtype} in its file, not {tuple(chunk.sizes)}")
            where = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))[depth:]
            whole[where] = data[tuple(inside)]
            found += whole[where].numel()
        if found != whole.numel():
            raise CheckpointError(f"{self.where}: {name} is not whole: {found} of {whole.numel()} numbers are in the files")
        return whole

    def common_state(self) -> tuple[bytes, str] | None:
        """(a file of torch.save with the state that all ranks share, what messages call it), where it is not in common.pt."""
        if not isinstance(self._entries.get(_COMMON_STATE), BytesStorageMetadata):
            return None
        return self._stored(MetadataIndex(_COMMON_STATE))

    def _stored(self, index: MetadataIndex) -> tuple[bytes, str]:
        stored = self._storage.get(index)
        if stored is None:
            raise CheckpointError(f"{self.where}: has no place for {index.fqn}")
        if not is_plain_name(stored.relative_path):
            raise CheckpointError(f"{self.where}: refers to {stored.relative_path!r}, which is not a file beside it")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{self.where}: {index.fqn} is compressed; allowed: files as Megatron-Core writes them")
        name = self._name(stored.relative_path)
        return self._files.read(name, offset=stored.offset, length=stored.length), self._files.where(name)

    def _name(self, name: str) -> str:
        return (self._folder / name).as_posix()


_ARRAY = ".zarray"
_ZARR_DTYPES = {"bfloat16": torch.bfloat16, "<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}
# What else of an array's description changes the meaning of its bytes, and the only values that are read.
_ZARR_FIXED: dict[str, tuple[Any, ...]] = {
    "zarr_format": (2,),
    "compressor": (None,),
    "filters": (None, []),
    "order": ("C",),
    "dimension_separator": (".", "/"),
}


class Zarr:
    """The tensors in a folder, whole or by their first indices. Raises CheckpointError naming the file that is damaged or not read."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, PurePosixPath(folder)
        paths = [PurePosixPath(name) for name in files.names()]
        self._names = [path.parent.name for path in paths if path.name == _ARRAY and path.parent.parent == self._folder]
        self._described: dict[str, dict[str, Any]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._description(name)["shape"]) for name in self._names}

    def dtype(self, name: str) -> torch.dtype:
        kind = self._description(name)["dtype"]
        if kind not in _ZARR_DTYPES:
            raise CheckpointError(f"{self._where(name)}: dtype={kind!r} is not read; allowed: {', '.join(_ZARR_DTYPES)}")
        return _ZARR_DTYPES[kind]

    def read(self, name: str, index: tuple[int, ...]) -> Tensor:
        array, dtype = self._description(name), self.dtype(name)
        for key, allowed in _ZARR_FIXED.items():
            if array.get(key, allowed[0]) not in allowed:
                raise CheckpointError(f"{self._where(name)}: {key}={array[key]!r} is not read; allowed: {allowed[0]!r}")
        shape, sizes = array["shape"], array["chunks"]
        depth, separator = len(index), array.get("dimension_separator", ".")
        whole = torch.empty(shape[depth:], dtype=dtype)
        first = [at // size for at, size in zip(index, sizes, strict=False)]
        inside = tuple(at % size for at, size in zip(index, sizes, strict=False))
        for rest in itertools.product(*(range(math.ceil(n / size)) for n, size in zip(shape[depth:], sizes[depth:], strict=True))):
            file = (self._folder / name / separator.join(map(str, (*first, *rest)))).as_posix()
            data = self._files.read(file)
            if len(data) != math.prod(sizes) * dtype.itemsize:
                raise CheckpointError(f"{self._files.where(file)} has {len(data)} bytes, a chunk {math.prod(sizes) * dtype.itemsize}")
            chunk = torch.frombuffer(bytearray(data), dtype=dtype).reshape(sizes)[inside]
            where = tuple(slice(at * size, (at + 1) * size) for at, size in zip(rest, sizes[depth:], strict=True))
            target = whole[where]  # the last chunks are filled up to their whole size
            target.copy_(chunk[tuple(slice(size) for size in target.shape)])
        return whole

    def common_state(self) -> None:
        """It is in common.pt."""

    def _description(self, name: str) -> dict[str, Any]:
        if name not in self._described:
            array = self._files.json((self._folder / name / _ARRAY).as_posix())
            shape, sizes = array.get("shape"), array.get("chunks")
            whole = isinstance(shape, list) and isinstance(sizes, list) and len(shape) == len(sizes)
            if not whole or not all(isinstance(size, int) and size > 0 for size in (*shape, *sizes)):
                raise CheckpointError(f"{self._where(name)} is damaged: shape={shape!r}, chunks={sizes!r}")
            self._described[name] = array
        return self._described[name]

    def _where(self, name: str) -> str:
        return self._files.where((self._folder / name / _ARRAY).as_posix())
