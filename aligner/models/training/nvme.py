"""Optimizer state in a file (`optimizer.nvme_path`): of each parameter a record with its float32 weight and two moments.

A step streams the records through two buffers: while one is updated, the one before is written and the next is read. Reads and writes are
system calls and not page faults of a mapped file, so a disk that fails is an exception and not the end of the process. Outside of steps,
in checkpoints, the records are tensors that map the file.

The file has no name in its folder: it goes with the process, however that ends. All of its blocks are taken at the start, so a disk that
is full later does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from aligner.errors import AlignerError, ConfigError, describe_os_error
from aligner.models.training.offload import LockedMemory

STATES = 3  # of a record: the weight and the moments, one behind the other
_PAGE = 4096  # bytes; a record begins at a multiple


class StateFile:
    """Records of `STATES` tensors each, with these shapes. Raises ConfigError if the folder has no room for them."""

    def __init__(self, folder: Path, shapes: Sequence[torch.Size]) -> None:
        self._folder, self._shapes = folder, shapes
        self._sizes = [4 * STATES * shape.numel() for shape in shapes]
        self._starts = [0, *accumulate(-(-size // _PAGE) * _PAGE for size in self._sizes)]
        total = max(self._starts[-1], _PAGE)
        try:
            self._file = TemporaryFile(dir=folder, buffering=0)
            os.posix_fallocate(self._file.fileno(), 0, total)
        except OSError as error:
            wanted = f"{total / 2**30:.2f} GiB of this rank's optimizer"
            raise ConfigError(f"optimizer.nvme_path={folder}: no room for {wanted}: {describe_os_error(error, folder)}") from error
        mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{self._file.fileno()}", True, total)
        self._mapped = [self._views(mapped, start, number) for number, start in enumerate(self._starts[:-1])]
        self._memory = LockedMemory()
        largest = max((size // STATES * (STATES + 1) for size in self._sizes), default=4)
        self._buffers = [self._memory.take(max(4, largest)) for _ in range(2)]
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="optimizer-state")
        self._synchronised: Future[None] | None = None

    def __getitem__(self, number: int) -> list[Tensor]:
        """The record's tensors, mapped."""
        return self._mapped[number]

    def settle(self, *, read: bool = False) -> None:
        """Wait until the disk has what was written; with `read` also read everything. Raises AlignerError if the disk failed."""
        if self._synchronised is not None:
            self._result(self._synchronised)
            self._synchronised = None
        for number in range(len(self._sizes)) if read else ():
            self._result(self._worker.submit(self._move, os.preadv, number, self._buffers[0]))

    def stream(self, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
        """The tensors of each of these records, and one of their shape with any contents, in memory: changes until the next is asked for
        are kept. Raises AlignerError if the disk failed."""
        self.settle()
        written: list[Future[None]] = []
        reading = self._worker.submit(self._move, os.preadv, numbers[0], self._buffers[0]) if numbers else None
        for place, number in enumerate(numbers):
            own, other = self._buffers[place % 2], self._buffers[1 - place % 2]
            assert reading is not None
            self._result(reading)
            if place + 1 < len(numbers):  # behind the write of the other buffer: there is one worker
                reading = self._worker.submit(self._move, os.preadv, numbers[place + 1], other)
            yield self._views(own, 0, number, STATES + 1)
            written.append(self._worker.submit(self._move, os.pwritev, number, own))
        for each in written:
            self._result(each)
        self._synchronised = self._worker.submit(os.fdatasync, self._file.fileno())

    def _views(self, storage: torch.UntypedStorage, start: int, number: int, count: int = STATES) -> list[Tensor]:
        shape, first = self._shapes[number], start // 4
        return [torch.empty(0).set_(storage, first + state * shape.numel(), shape) for state in range(count)]

    def _move(self, call: object, number: int, buffer: torch.UntypedStorage) -> None:
        """Read or write a record whole; either call may move a part."""
        size = self._sizes[number]
        bytes_of = torch.empty(0, dtype=torch.uint8).set_(buffer, 0, (size,)).numpy()
        left = memoryview(bytes_of)
        while left:
            moved = call(self._file.fileno(), [left], self._starts[number] + size - len(left))  # type: ignore[operator]
            if not moved:
                raise OSError(f"the file ends at {self._starts[number] + size - len(left)} bytes")
            left = left[moved:]

    def _result(self, future: Future[None]) -> None:
        try:
            future.result()
        except OSError as error:
            failed = f"its disk failed: {describe_os_error(error, self._folder)}"
            raise AlignerError(f"optimizer.nvme_path={self._folder}: {failed}; the last checkpoint stands") from error
