"""Tensors of a `torch_dist` checkpoint: torch's distributed checkpoint format, read without torch.distributed."""

from __future__ import annotations

import io
from pathlib import PurePosixPath

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from aligner.errors import CheckpointError
from aligner.files import is_plain_name
from aligner.models.checkpoint import safe_pickle
from aligner.models.checkpoint.foreign.files import Files

_METADATA = ".metadata"
_COMMON_STATE = "common_state/shard_0_1"  # in place of common.pt since Megatron-Core 0.19


class TorchDist:
    """The tensors in a folder, whole or by their first indices. Raises CheckpointError naming the file that is damaged."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, PurePosixPath(folder)
        self._where = files.where(self._name(_METADATA))
        with files.open(self._name(_METADATA)) as file:
            metadata = safe_pickle.read_metadata(file, self._where)
        self._entries, self._storage = metadata.state_dict_metadata, metadata.storage_data

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        return {name: tuple(entry.size) for name, entry in self._entries.items() if isinstance(entry, TensorStorageMetadata)}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
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
            data = self._chunk(name, chunk.offsets)
            if data.shape != chunk.sizes or data.dtype != whole.dtype:
                raise CheckpointError(f"{self._where}: {name} is {tuple(data.shape)} {data.dtype} in its file, not {tuple(chunk.sizes)}")
            where = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))[depth:]
            whole[where] = data[tuple(inside)]
            found += whole[where].numel()
        if found != whole.numel():
            raise CheckpointError(f"{self._where}: {name} is not whole: {found} of {whole.numel()} numbers are in the files")
        return whole

    def common_state(self) -> tuple[bytes, str] | None:
        """(a file of torch.save with the state that all ranks share, what messages call it), where it is not in common.pt."""
        if not isinstance(self._entries.get(_COMMON_STATE), BytesStorageMetadata):
            return None
        return self._stored(MetadataIndex(_COMMON_STATE))

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        data, where = self._stored(MetadataIndex(name, offsets))
        tensor = safe_pickle.load_as_data(io.BytesIO(data), f"{where}: {name}")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: {name} is no tensor")
        return tensor

    def _stored(self, index: MetadataIndex) -> tuple[bytes, str]:
        stored = self._storage.get(index)
        if stored is None:
            raise CheckpointError(f"{self._where}: does not say where {index.fqn} is")
        if not is_plain_name(stored.relative_path):
            raise CheckpointError(f"{self._where}: refers to {stored.relative_path!r}, which is no file beside it")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{self._where}: {index.fqn} is compressed; allowed: files as Megatron-Core writes them")
        name = self._name(stored.relative_path)
        return self._files.read(name, offset=stored.offset, length=stored.length), self._files.where(name)

    def _name(self, name: str) -> str:
        return (self._folder / name).as_posix()
