"""Connects the training ranks of a replica with the processes of its TensorRT-LLM engine: their start, and the sockets.

The sockets are files in a directory of the replica that only its user can enter: on `requests` the replica's first rank waits for the
engine's process, on `worker<i>` rank i waits for the worker on its GPU. A message is a pickled tuple whose first item is its kind. A tensor
on a GPU travels as a handle of its memory (CUDA IPC), which another process on the same GPU opens; others travel by value.

Unpickling can run code. So a process that connects must first send the socket's key, from a file beside it that only its user can read;
other processes are disconnected, and nothing that they send is unpickled.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from aligner.errors import EngineError

REQUESTS = "requests"
KEY_BYTES, KEY_SECONDS = 32, 10.0  # and the time to send it
ALIGNMENT = 16  # bytes: no element has more
DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor: the number of the GPU in the process that opens the handle
# Variables of launchers: an MPI library that sees them would join their world, or wait for it.
HIDDEN_PREFIXES = ("PMI_", "PMI2_", "PMIX_", "MPI_", "OMPI_", "PRTE_", "SLURM_", "TORCHELASTIC_")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PERMISSION = "_ALLOW_RUN_AS_ROOT"  # of Open MPI in a container, not part of a world
SET = {"TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1"}  # threads gain nothing for single buckets

Spec = tuple[str, torch.dtype, tuple[int, ...], int]  # of a tensor in a buffer: its name, dtype, shape, and first byte


def worker_socket(home: Path, index: int) -> Path:
    """Where rank `index` of the replica waits for its worker."""
    return home / f"worker{index}"


def engine_environment(environ: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """The environment of the engine's process: no launchers' variables, only the replica's GPUs, and the modules of this process."""
    hidden = {name for name in environ if name.startswith(HIDDEN_PREFIXES) and PERMISSION not in name} | set(HIDDEN)
    kept = {name: value for name, value in environ.items() if name not in hidden}
    return kept | SET | {"CUDA_VISIBLE_DEVICES": ",".join(devices), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def start_process(home: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The engine's process, which connects to `requests` in `home`. In its own session: signals of a terminal are for the ranks."""
    command = [sys.executable, "-m", "aligner.rollout.tensorrt_llm.worker", str(home)]
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)


def gpu_name() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else "cpu"


def packed(bucket: Sequence[tuple[str, Tensor]]) -> tuple[list[Spec], Tensor]:
    """Named tensors of one device copied into one buffer there, uint8 [bytes], and the place of each.

    The tensors themselves may be parameters, whose memory must be free to move, so they are not shared.
    """
    specs: list[Spec] = []
    size = 0
    for name, tensor in bucket:
        specs.append((name, tensor.dtype, tuple(tensor.shape), size))
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
    for (_, tensor), (*_, start) in zip(bucket, specs, strict=True):
        buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return specs, buffer


def unpacked(specs: Iterable[Spec], buffer: Tensor) -> dict[str, Tensor]:
    """The tensors of `packed`, as views of the buffer."""
    found = {}
    for name, dtype, shape, start in specs:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        found[name] = buffer[start : start + num_bytes].view(dtype).view(shape)
    return found


def handle(buffer: Tensor) -> Any:
    """A tensor's form in a message: a handle on a GPU, where the tensor must live until the other side is done with it."""
    return reductions.reduce_tensor(buffer) if buffer.is_cuda else buffer


def opened(handle: Any, device: int) -> Tensor:
    """The tensor of a handle, in another process, where its GPU has the number `device`."""
    if isinstance(handle, Tensor):
        return handle
    rebuild, arguments = handle
    return rebuild(*arguments[:DEVICE_ARGUMENT], device, *arguments[DEVICE_ARGUMENT + 1 :])


class Link:
    """One end of a connection to `who`. After an error or a timeout it can no longer be used."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        self._connection = Connection(connection.detach())
        self._who = who
        self._lost = ""

    @property
    def is_lost(self) -> bool:
        """Whether an error or a timeout was raised before."""
        return bool(self._lost)

    def fileno(self) -> int:
        """For event loops: readable if a message has arrived."""
        return self._connection.fileno()

    def send(self, *message: Any) -> None:
        """Raises EngineError if the other end is gone."""
        self._refuse_lost()
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise self._lose(f"{self._who} ended; see its own messages") from error

    def has_message(self, seconds: float) -> bool:
        """Whether a message (or the end) has arrived within this time."""
        self._refuse_lost()
        return self._connection.poll(seconds)

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """The next message, within `seconds`. Raises EngineError if none comes or the other end is gone."""
        self._refuse_lost()
        try:
            if not self._connection.poll(seconds):
                raise self._lose(f"{self._who} did not answer within {seconds:.0f} s")
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lose(f"{self._who} ended; see its own messages") from error

    def call(self, name: str, *arguments: Any, seconds: float) -> Any:
        """The result of the other end's method. Raises EngineError with its error, and after `seconds`."""
        self.send(name, *arguments)
        kind, value = self.receive(seconds)
        if kind == "error":
            raise EngineError(value)
        return value

    def close(self) -> None:
        self._lost = self._lost or "the connection was closed"
        self._connection.close()

    def _lose(self, why: str) -> EngineError:
        self._lost = why
        return EngineError(why)

    def _refuse_lost(self) -> None:
        if self._lost:
            raise EngineError(self._lost)


class Door:
    """A socket's file that waits for one process, and the file of its key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._remove()
        try:
            self._socket.bind(str(path))
        except OSError as error:  # usually the path is too long: 107 bytes are allowed
            raise EngineError(f"{path}: cannot make a socket ({error}); set TMPDIR to a short path on the node's own disk") from error
        with open(os.open(_key_path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self._key)
        self._socket.listen(1)

    def _remove(self) -> None:
        for file in (self._path, _key_path(self._path)):
            file.unlink(missing_ok=True)

    def answer(self, who: str, seconds: float, check: Callable[[], None] = lambda: None) -> Link:
        """The connection of the process with the key. `check`, called every second, raises if the wait has become useless."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(min(1.0, seconds))
        while True:
            try:
                came, _ = self._socket.accept()
            except TimeoutError:
                check()
                if time.monotonic() < deadline:
                    continue
                raise EngineError(f"{who} did not connect to {self._path} within {seconds:.0f} s") from None
            came.settimeout(KEY_SECONDS)
            with suppress(OSError):
                if hmac.compare_digest(came.recv(KEY_BYTES), self._key):
                    came.settimeout(None)
                    self._socket.close()
                    self._remove()
                    return Link(came, who)
            came.close()
            print(f"warning: {self._path}: a process without the key connected, which is not {who}: it was sent away", flush=True)


def knock(path: Path, who: str) -> Link:
    """Connect to a door. Raises OSError if it does not exist."""
    key, connection = _key_path(path).read_bytes(), socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(key)
    return Link(connection, who)


def _key_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.key")
