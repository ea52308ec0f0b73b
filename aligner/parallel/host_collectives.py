"""Collectives of CUDA tensors over the host, for ranks that share a GPU (`run.ranks_per_gpu`): NCCL refuses two ranks of one GPU, and gloo
sends CPU tensors only. Each operator copies its tensors to the host, runs on the copies, waits, and copies the results back. Only a receive
does not wait at once, since two ranks that send to each other receive first.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

RECEIVES = ("recv_", "recv_any_source_")
OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier", "send", *RECEIVES),
    *("allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "_allgather_base_", "gather_", "scatter_"),
    *("reduce_scatter_", "reduce_scatter_tensor_coalesced_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_"),
)
_library: torch.library.Library | None = None
_guard = threading.Lock()


def install() -> None:
    """Use the host for the rest of this process."""
    global _library
    with _guard:
        if _library is not None:
            return
        _library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it had kernels for CUDA tensors before
            for name in OPERATORS:
                _library.impl(name, partial(over_the_host, getattr(torch.ops.c10d, name).default), "CUDA")


def is_installed() -> bool:
    return _library is not None


def over_the_host(operator: Callable[..., Any], *args: Any) -> Any:
    """The result of a torch.distributed operator for CUDA tensors. Its work is done, except for a receive, which must be waited for."""
    pairs: list[tuple[Tensor, Tensor]] = []
    work_type = torch._C._distributed_c10d.Work

    def to_host(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return value
        pairs.append((value, value.cpu()))
        return pairs[-1][1]

    result = operator(*tree_map(to_host, args))
    name = operator.__name__.partition(".")[0]  # type: ignore[attr-defined]
    if name in RECEIVES:
        return _Received(work_type.unbox(result), pairs).boxed()
    for part in tree_flatten(result)[0]:
        if isinstance(part, torch.ScriptObject) and name != "send":
            work_type.unbox(part).wait()
    if name != "send":
        _copy_back(pairs)
    originals = {id(host): tensor for tensor, host in pairs}
    return tree_map(lambda value: originals.get(id(value), value), result)


def _copy_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, host in reversed(pairs):  # a result precedes a tensor that contains it
        tensor.detach().copy_(host)  # a stage's input requires a gradient before it is received


class _Received(dist.Work):
    """A receive into host memory; `wait` copies it to the device."""

    _waiting: set[_Received] = set()  # torch keeps only its own half of the object

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._pairs = work, pairs
        self._waiting.add(self)

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        _copy_back(self._pairs)
        self._waiting.discard(self)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()
