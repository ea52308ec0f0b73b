"""Offloads tensors that a phase does not need to host memory.

A tensor is moved by copying its storage to the host and shrinking the storage on the device to nothing; every view into it (parameters of
a flat buffer) stays valid and comes back with it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aligner.parallel import platform
from aligner.parallel.mcore import ChainedOptimizer

_ALIGNMENT = 64  # bytes; of any type's size a multiple


class LockedMemory:
    """Host memory, of the size that is asked for (torch rounds to powers of two), that a device accesses without the host's waiting."""

    def __init__(self) -> None:
        self._locked: list[torch.UntypedStorage] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False  # before the memory is freed; a process that ends needs no such care

    def take(self, size: int) -> torch.UntypedStorage:
        """`size` bytes, more than 0, of any contents. Raises RuntimeError where the pages cannot be locked."""
        if not torch.cuda.is_available():
            return torch.UntypedStorage(size, device="cpu")
        storage = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()  # pages that it shares with nothing
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), size, 0)))
        self._locked.append(storage)
        return storage

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors of these shapes and types, side by side in one piece of memory."""
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        storage = self.take(max(1, starts[-1]))
        return [
            torch.empty(0, dtype=tensor.dtype).set_(storage, start // tensor.element_size(), tensor.shape)
            for tensor, start in zip(tensors, starts, strict=False)
        ]


class HostMemory:
    """A set of storages that are on the device together or in host memory together.

    `kept` gives the tensors whose contents matter (asked again at every move: optimizer state appears with the first step), `scratch` those
    that may come back with any contents. Host memory is kept for the next move: pages that the device can read take seconds to allocate.
    """

    def __init__(self, *, kept: Callable[[], Iterable[Tensor]] = tuple, scratch: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._kept = kept
        self._scratch = scratch
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self._free: dict[int, list[torch.UntypedStorage]] = {}  # host storages that wait for the next move, by size
        self._memory = LockedMemory()

    def move_out(self) -> None:
        """Copy to host memory and free the device's. Does nothing where that has been done."""
        if self._away:
            return
        seen: set[int] = set()
        for tensors, copies in ((self._kept(), True), (self._scratch(), False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in seen or not storage.nbytes():
                    continue
                seen.add(storage.data_ptr())
                self._away.append((storage, storage.nbytes(), self._to_host(storage) if copies else None))
        if self._away:
            platform.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)

    def move_in(self) -> None:
        """Allocate on the device again and copy back. Does nothing if nothing is offloaded."""
        for storage, size, copy in self._away:
            storage.resize_(size)
            if copy is not None:
                storage.copy_(copy, non_blocking=True)
        if self._away:
            platform.synchronize()  # the next move may write over the copies
        for _, size, copy in self._away:
            if copy is not None:
                self._free.setdefault(size, []).append(copy)
        self._away = []

    def _to_host(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        waiting = self._free.get(storage.nbytes())
        host = waiting.pop() if waiting else self._memory.take(storage.nbytes())
        host.copy_(storage, non_blocking=True)
        return host


def _unlock(storages: list[torch.UntypedStorage]) -> None:
    for storage in storages:
        torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())


def gradients(runners: list[Any]) -> list[Tensor]:
    """The buffers of trained chunks' gradients."""
    return [buffer.grad_data for runner in runners for buffer in (*runner.buffers, *runner.expert_parallel_buffers)]


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Moments and float32 main weights of Megatron-Core's (chained) optimizer that are tensors of their own, not views of the model's."""
    found: list[Tensor] = []
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        parameters = {id(p): p for group in part.optimizer.param_groups for p in group["params"]}
        found += [p.data for p in parameters.values() if p.dtype == torch.float32 and (part.config.bf16 or part.config.fp16)]
        found += [value for state in part.optimizer.state.values() for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return found


def device_tensors(optimizer: Any) -> list[Tensor]:
    """As `optimizer_tensors`, without those that are always the host's (`optimizer.cpu_offload`), or in a file."""
    tensors = [tensor for tensor in optimizer_tensors(optimizer) if tensor.device == platform.device()]
    return [tensor for tensor in tensors if tensor.untyped_storage().resizable()]


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The same, those of each device together: what is computed of them need not cross between host and device one by one."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())
