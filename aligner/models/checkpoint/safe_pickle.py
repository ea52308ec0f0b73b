"""Checks the pickles in Megatron-Core's checkpoint directories before they are loaded: loading a pickle can run arbitrary code.

torch unpickles `.metadata` without restrictions, so it is first read with an unpickler that knows only the classes of such files. Byte
objects (Transformer Engine's extra states, 0.19's common state) and `common.pt` must load as plain data. Megatron-LM's own `common.pt`
holds objects of its classes: `load_inert` reads it with stand-ins for them, importing and calling nothing.
"""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from aligner.errors import CheckpointError
from aligner.files import is_plain_name

_METADATA, COMMON = ".metadata", "common.pt"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_METADATA_CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_PLANNER_CLASSES = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType", "BytesIOWriteData")
_ALLOWED = frozenset(
    {("torch", "Size"), ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
    | {(_METADATA_MODULE, name) for name in _METADATA_CLASSES}
    | {(_PLANNER_MODULE, name) for name in _PLANNER_CLASSES}
)
# Subclasses that only Megatron-Core before 0.16 wrote, with nothing that is needed here.
_FORMER = {"MCoreMetadata": (_METADATA_MODULE, "Metadata"), "MCoreSavePlan": (_PLANNER_MODULE, "SavePlan")}
_MCORE_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
# Whose names may occur in the common state of a checkpoint of Megatron-LM. None of them is imported.
_KNOWN_PACKAGES = ("argparse", "collections", "enum", "megatron", "numpy", "pathlib", "signal", "torch", "transformer_engine", "types")
_KNOWN_NAMES = (
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "getattr", "object", "range", "set", "slice")),
    *(("copyreg", "_reconstructor"), ("_codecs", "encode")),
)
_FORMER_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # Python 2's names, which torch.save writes


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of `.metadata` and torch's dtypes; anything else is refused before it is even imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == _MCORE_MODULE and name in _FORMER:
            module, name = _FORMER[name]
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Enum:
    """What `getattr` may be used for: Python 3.11.0 to 3.11.3 pickle a member of an enum as an attribute of its class."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it refers to the attribute {name!r} of {kind!r}, which no checkpoint needs")


class Inert:
    """Stands for whatever a name in a pickle means. It takes whatever a pickle does to it and does nothing."""

    name = ""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As of a list."""

    extend = add = append

    def __call__(self, *_: Any) -> Inert:
        return self

    def __repr__(self) -> str:
        return f"{self.name}{getattr(self, 'arguments', ())}"


class _InertUnpickler(pickle.Unpickler):
    """Imports nothing: every name becomes a stand-in, and one that no checkpoint of Megatron-LM has is refused."""

    def find_class(self, module: str, name: str) -> Any:
        module = _FORMER_MODULES.get(module, module)
        if (module, name) == ("argparse", "Namespace"):
            return argparse.Namespace
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.partition(".")[0] in _KNOWN_PACKAGES or (module, name) in _KNOWN_NAMES:
            return type("Inert", (Inert,), {"name": f"{module}.{name}"})
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Inert:
        """A tensor's numbers, which are not read."""
        return Inert()


def load_inert(file: IO[bytes], where: str) -> Any:
    """What a file of torch.save holds, without its tensors and with an `Inert` for every object that is not plain data.

    Nothing is imported or called. Raises CheckpointError, which calls the file `where`, if it is damaged or refers to other packages.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _InertUnpickler(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # a pickle of someone else's making can fail in any way
        raise CheckpointError(f"{where}: is refused or damaged: {error}") from error


def check(directory: Path) -> None:
    """Raise CheckpointError where a Megatron-Core checkpoint directory holds a pickle that does more than hold data; runs none of it."""
    if (directory / COMMON).exists():  # Megatron-Core 0.19 writes a byte object in its place
        load_data(directory / COMMON)
    try:
        with (directory / _METADATA).open("rb") as file:
            metadata = read_metadata(file, str(directory / _METADATA))
    except OSError as error:
        raise CheckpointError(f"{directory / _METADATA}: is not a checkpoint's metadata: {error}") from error
    for index, stored in metadata.storage_data.items():
        if not is_plain_name(stored.relative_path):
            raise CheckpointError(f"{directory / _METADATA}: refers to {stored.relative_path!r}, which is not a file beside it")
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (directory / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                load_as_data(io.BytesIO(file.read(stored.length)), directory / stored.relative_path)


def load_data(path: Path) -> Any:
    """What a file of torch.save holds, tensors on the CPU. Raises CheckpointError where that is not plain data; runs none of it."""
    try:
        with path.open("rb") as file:
            return load_as_data(file, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_metadata(file: IO[bytes], where: str) -> Metadata:
    """torch's index of a distributed checkpoint. Raises CheckpointError, which calls the file `where`; runs nothing of it."""
    try:
        metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a pickle of someone else's making can fail in any way
        raise CheckpointError(f"{where}: is not a checkpoint's metadata: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{where}: is not a checkpoint's metadata: it holds {type(metadata).__name__}")
    return metadata


def load_as_data(file: IO[bytes], path: Path | str) -> Any:
    """What torch.save wrote, tensors on the CPU. Raises CheckpointError, which calls the file `path`, where that is not plain data."""
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # see above
        raise CheckpointError(f"{path}: holds more than data: {error}") from error
