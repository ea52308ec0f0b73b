"""Writing Megatron-Core distributed checkpoints from a thread of the training process.

Megatron-Core splits a save into a plan (collective), the writing of each rank's files (local) and the metadata (collective), and forks
processes for the middle part. Here a thread writes the same files: it dies with its process, so no orphan of a killed run keeps writing,
nothing is forked out of a process that holds CUDA, NCCL and gloo threads, and `wait` raises its error. While it writes or hashes, it holds
the interpreter's lock only briefly.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from aligner.errors import CheckpointError
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


OVERHEAD = 1.02  # of file formats, and small files


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise CheckpointError, with rank and cause, for what Megatron-Core raises meanwhile; its warnings are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (TorchCheckpointException, OSError) as error:
            raise CheckpointError(f"writing a checkpoint failed: rank {dist.get_rank()}: {explain(error, directory)}") from error


def plan(state: dict[str, Any], directory: Path) -> PlannedDirectory:
    """Decide which rank writes what of a sharded state, whose tensors are still the model's. Collective. Raises CheckpointError."""
    with _explained(directory):
        request = dist_checkpointing.save(state, str(directory), async_sharded_save=True, **SAVE_PLAN)
    return PlannedDirectory(path=directory, request=request, results={})


def planned_bytes(planned: Sequence[PlannedDirectory]) -> int:
    """Bytes that all ranks together will write. Collective."""
    buckets = [bucket for part in planned for _, _, bucket in part.buckets]
    own = sum(buffer.getbuffer().nbytes for objects, _ in buckets for _, buffer in objects)
    own += sum(tensor.nbytes for _, tensors in buckets for _, tensor in tensors)
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
            for part in planned:  # CPU tensors are copied too: a planned one may be the live weight itself
                for number, (path, name, (objects, tensors)) in enumerate(part.buckets):
                    copied = [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]
                    part.buckets[number] = (path, name, (objects, copied))
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
        start, failed = time.monotonic(), None
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        error = self._error
        if not self.is_done:
            error = TimeoutError(f"its files were not written {time.monotonic() - start:.0f} s after they were waited for")
        if error is not None:
            failed = CheckpointError(f"writing a checkpoint failed: rank {dist.get_rank()}: {explain(error, self._root)}")
            failed.__cause__ = error
        raise_everywhere(failed)

    def _write(self) -> None:
        with recording.span("write files", recording.rank_lane("checkpoint")):
            try:
                for part in self.planned:
                    for number, (path, *_) in enumerate(list(part.buckets)):
                        part.results[number] = _write_bucket(part, number)
                        self.digests[str(Path(path).relative_to(self._root))] = digest(Path(path))
            except Exception as error:  # of whatever kind: raised by `wait`, on every rank
                self._error = error


def write_metadata(part: PlannedDirectory) -> None:
    """Write the files that describe what the ranks wrote into a directory. Every rank calls it, after `FileWriter.wait`."""
    if part.request.async_fn is not None:
        part.request.async_fn_args[2].put(part.results)
    with _explained(part.path):
        for finalize in part.request.finalize_fns:
            finalize()


def _write_bucket(part: PlannedDirectory, number: int) -> list[Any]:
    """Write one file as Megatron-Core does, and release its tensors. Returns the file's entries for the metadata."""
    path, name, (objects, tensors) = part.buckets[number]
    on_host = [(item, tensor.to("cpu")) for item, tensor in tensors]
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    working: queue.Queue[int] = queue.Queue()
    working.put(number)  # it is taken out at the end, as its parent process expects
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        part.request.async_fn.args[0], number, (path, name, (objects, on_host)), results, working, use_fsync=True
    )
    part.buckets[number] = (path, name, ([], []))
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        raise written
    return written
