"""Writing Megatron-Core distributed checkpoints from a thread of the training process.

Megatron-Core splits a save into a plan (collective), the writing of each rank's files (local) and the metadata (collective), and forks
processes for the middle part: one more per file. Here a thread writes the same files. A thread dies with its process, so no orphan of a
killed run keeps writing. `wait` raises its error. Nothing is forked out of a process that holds CUDA, NCCL and gloo threads. While the
thread writes or hashes, it holds the interpreter's lock only briefly.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from aligner.errors import CheckpointError, describe_os_error
from aligner.models.checkpoint.files import explain
from aligner.models.checkpoint.manifest import Digest, digest
from aligner.parallel.collectives import gather_objects, raise_everywhere
from aligner.parallel.mcore import SAVE_PLAN, dist_checkpointing, filesystem_async
from aligner.telemetry import recording


@dataclass(slots=True)
class PlannedDirectory:
    """What this rank will write into one distributed checkpoint directory."""

    path: Path
    request: Any  # Megatron-Core's AsyncRequest; its function is None where this rank writes nothing
    results: dict[int, Any]  # per file, what the metadata must know of it

    @property
    def buckets(self) -> list[tuple[str, str, tuple[list, list]]]:
        """(path, file name, (bytes to write, tensors to write)) of each file. Copying and writing change the list in place."""
        return [] if self.request.async_fn is None else self.request.async_fn_args[1]

    @property
    def transforms(self) -> list[Any]:
        """torch's write transforms: none, but its writing function requires the argument."""
        return [] if self.request.async_fn is None else self.request.async_fn.args[0]


OVERHEAD = 1.02  # of file formats, and small files


def plan(state: dict[str, Any], directory: Path) -> PlannedDirectory:
    """Decide which rank writes what of a sharded state. Every rank calls it. The tensors are still those of the model.

    Raises CheckpointError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            request = dist_checkpointing.save(state, str(directory), async_sharded_save=True, **SAVE_PLAN)
        except OSError as error:
            raise CheckpointError(f"writing a checkpoint failed: rank {dist.get_rank()}: {describe_os_error(error, directory)}") from error
    return PlannedDirectory(path=directory, request=request, results={})


def planned_bytes(planned: Sequence[PlannedDirectory]) -> int:
    """Bytes that all ranks together will write. Collective."""
    own = 0
    for part in planned:
        for _, _, (objects, tensors) in part.buckets:
            own += sum(buffer.getbuffer().nbytes for _, buffer in objects) + sum(tensor.nbytes for _, tensor in tensors)
    return int(sum(gather_objects(own)) * OVERHEAD)


class FileWriter:
    """Writes and hashes this rank's files of some planned directories: at once, or from a thread while training continues."""

    def __init__(self, planned: Sequence[PlannedDirectory], root: Path, *, in_background: bool) -> None:
        """With `in_background`, copy the tensors to host memory before returning; training may then change the originals."""
        self.planned = planned
        self.digests: dict[str, Digest] = {}  # by path relative to `root`; complete once `wait` has returned
        self._root = root
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            for part in planned:
                _copy_to_host(part)
            # A daemon: where the process ends with an error, nobody will publish what it writes.
            self._thread = threading.Thread(target=self._write, name=f"checkpoint-writer-{root.name}", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing more to write (it may have failed)."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until every rank has written. Every rank calls it. If one fails or times out, every rank raises its CheckpointError."""
        start, error = time.monotonic(), self._error
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            error = self._error
            if self._thread.is_alive():
                seconds = time.monotonic() - start
                error = TimeoutError(f"its files were not written {seconds:.0f} s after they were waited for")
        if error is not None:
            failed = CheckpointError(f"writing a checkpoint failed: rank {dist.get_rank()}: {explain(error, self._root)}")
            failed.__cause__ = error
            raise_everywhere(failed)
        raise_everywhere(None)

    def _write(self) -> None:
        with recording.span("write files", recording.rank_lane("checkpoint")):
            self._write_all()

    def _write_all(self) -> None:
        try:
            for part in self.planned:
                for number in range(len(part.buckets)):
                    path = Path(part.buckets[number][0])
                    part.results[number] = _write_bucket(part, number)
                    self.digests[str(path.relative_to(self._root))] = digest(path)
        except Exception as error:  # of whatever kind: raised by `wait`, on every rank
            self._error = error


def write_metadata(part: PlannedDirectory) -> None:
    """Write the files that describe what the ranks wrote into a directory. Every rank calls it, after `FileWriter.wait`."""
    if part.request.async_fn is not None:
        part.request.async_fn_args[2].put(part.results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for finalize in part.request.finalize_fns:
                finalize()
        except (TorchCheckpointException, OSError) as error:
            raise CheckpointError(f"writing a checkpoint failed: rank {dist.get_rank()}: {explain(error, part.path)}") from error


def _copy_to_host(part: PlannedDirectory) -> None:
    """Replace every tensor by a host copy. CPU tensors are copied too: a planned one may be the live weight itself."""
    for number, (path, name, (objects, tensors)) in enumerate(part.buckets):
        copied = [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]
        part.buckets[number] = (path, name, (objects, copied))


def _write_bucket(part: PlannedDirectory, number: int) -> list[Any]:
    """Write one file as Megatron-Core does, and release its tensors. Returns the file's entries for the metadata."""
    path, name, (objects, tensors) = part.buckets[number]
    on_host = [(item, tensor.to("cpu")) for item, tensor in tensors]
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    working: queue.Queue[int] = queue.Queue()
    working.put(number)  # it is taken out at the end, as its parent process expects
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        part.transforms, number, (path, name, (objects, on_host)), results, working, use_fsync=True
    )
    part.buckets[number] = (path, name, ([], []))
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        raise written
    return written
