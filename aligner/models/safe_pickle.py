"""Checks the pickles in Megatron-Core's checkpoint directories before they are loaded: loading a pickle can run arbitrary code.

torch unpickles `.metadata` without restrictions, so it is first read with an unpickler that knows only the classes of such files. Byte
objects (Transformer Engine's extra states, 0.19's common state) and `common.pt` must load as plain data. torch reads tensors as such.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from aligner.errors import CheckpointError

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


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of `.metadata` and torch's dtypes; anything else is refused before it is even imported."""

    def find_class(self, module: str, name: str) -> Any:
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


def check(directory: Path) -> None:
    """Raise CheckpointError where a Megatron-Core checkpoint directory holds a pickle that does more than hold data; runs none of it."""
    if (directory / COMMON).exists():  # Megatron-Core 0.19 writes a byte object in its place
        load_data(directory / COMMON)
    metadata = _read_metadata(directory / _METADATA)
    for index, stored in metadata.storage_data.items():
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{directory / _METADATA}: refers to {stored.relative_path!r}, which is no file beside it")
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (directory / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                _load_as_data(io.BytesIO(file.read(stored.length)), directory / stored.relative_path)


def load_data(path: Path) -> Any:
    """What a file of torch.save holds, tensors on the CPU. Raises CheckpointError where that is not plain data; runs none of it."""
    try:
        with path.open("rb") as file:
            return _load_as_data(file, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a pickle of someone else's making can fail in any way
        raise CheckpointError(f"{path}: is not a checkpoint's metadata: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: is not a checkpoint's metadata: it holds {type(metadata).__name__}")
    return metadata


def _load_as_data(file: IO[bytes], path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # see above
        raise CheckpointError(f"{path}: holds more than data: {error}") from error
