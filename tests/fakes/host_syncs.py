"""Counts what would make the host wait for a GPU, on tensors anywhere."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SIZED_BY_CONTENT = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive"}
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}


class HostSyncs(TorchDispatchMode):
    """In the block: the names of operators whose results the host reads, or whose sizes depend on a tensor's contents."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in _SIZED_BY_CONTENT or masks or (name == "repeat_interleave" and "output_size" not in (kwargs or {})):
            self.found.append(name)
        return function(*args, **(kwargs or {}))
