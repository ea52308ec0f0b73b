"""Tensors of a `zarr` checkpoint as Megatron-Core wrote them up to 0.9: format 2, a directory per tensor, uncompressed chunks."""

from __future__ import annotations

import itertools
import math
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from aligner.errors import CheckpointError
from aligner.models.checkpoint.foreign.files import Files

_ARRAY = ".zarray"
_DTYPES = {"bfloat16": torch.bfloat16, "<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}
# What else of an array's description changes the meaning of its bytes, and the only values that are read.
_FIXED: dict[str, tuple[Any, ...]] = {
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
        """Of all tensors."""
        return {name: tuple(self._description(name)["shape"]) for name in self._names}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        kind = self._description(name)["dtype"]
        if kind not in _DTYPES:
            raise CheckpointError(f"{self._where(name)}: dtype={kind!r} is not read; allowed: {', '.join(_DTYPES)}")
        return _DTYPES[kind]

    def read(self, name: str, index: tuple[int, ...]) -> Tensor:
        """`tensor[index]`."""
        array, dtype = self._description(name), self.dtype(name)
        for key, allowed in _FIXED.items():
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
