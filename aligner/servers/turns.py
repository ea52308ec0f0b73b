"""Components that share GPUs (`placement=colocated`) take turns: whoever holds the run's turn has its weights and training state on the
devices, the others have theirs in host memory. The idea is the hybrid engine's of DeepSpeed-Chat (2308.01320), over processes.

The turn is a lock on a file of the run directory, held by rank 0 for its component; the kernel releases it when that process ends. The
component that trains holds it, except while it waits for its servers (`SharedDevice`). A server holds it while it computes (`Residence`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol, TextIO

from aligner.errors import AlignerError, ConfigError, ServerTimeout, describe_os_error
from aligner.parallel import platform
from aligner.parallel.collectives import from_rank_0, raise_everywhere
from aligner.parallel.progress import WAIT_FOR_SERVERS, Progress

POLL_SECONDS = 0.02
LINGER_SECONDS = 0.1  # a server that has the turn waits this long for another request: moving its weights takes longer


class Movable(Protocol):
    """A model on this rank, with its training state."""

    def leave_device(self) -> None:
        """Move to host memory. Does nothing if it is there."""

    def enter_device(self) -> None:
        """Return to the device. Does nothing if it is there."""


class Turn:
    """The right to use the shared GPUs, on rank 0 of a component. `name` stands for the component in the others' errors."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._file: TextIO | None = None

    def try_take(self) -> bool:
        """Whether this component has the turn now. Raises ConfigError if the file system has no locks."""
        if self._file is not None:
            return True
        try:
            file = self._path.open("a+")
        except OSError as error:
            raise ConfigError(f"placement=colocated: {describe_os_error(error, self._path)}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError as error:
            file.close()
            raise ConfigError(
                f"placement=colocated: {self._path} cannot be locked ({error.strerror}): the components take turns by a lock; give a "
                "run.directory on a file system with flock"
            ) from error
        file.truncate(0)
        file.write(f"{self._name} (pid {os.getpid()})")
        file.flush()
        self._file = file
        return True

    def wait(self, seconds: float) -> bool:
        """Whether this component has the turn, after at most this long."""
        deadline = time.monotonic() + seconds
        while not self.try_take():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def take(self, timeout_seconds: float) -> None:
        """Wait for the turn. Raises ServerTimeout naming who has it."""
        if not self.wait(timeout_seconds):
            raise ServerTimeout(
                f"placement=colocated: {self._name} waited {timeout_seconds:g} s (server_client.train_timeout_seconds) for its turn on "
                f"the GPUs, which {self._path.read_text() or 'another component'} has"
            )

    def release(self) -> None:
        """Give it to the others. Does nothing without it."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # even if a child process has inherited the file
            self._file.close()
            self._file = None


@dataclass(eq=False)
class Residence:
    """A server's models on the devices that it shares: on every rank, with the turn on rank 0. Without a turn they always stay."""

    models: Sequence[Movable] = ()
    turn: Turn | None = None
    is_here: bool = True

    def try_take(self, wait_seconds: float) -> bool:
        """Whether rank 0 has the turn, after at most `wait_seconds`."""
        return self.turn is None or self.turn.wait(wait_seconds)

    @property
    def takes_turns(self) -> bool:
        """Whether the models leave while no request needs them; on rank 0."""
        return self.turn is not None

    def move(self, here: bool) -> None:
        if here == self.is_here:
            return
        for model in self.models:
            model.enter_device() if here else model.leave_device()
        if not here:
            platform.release_cached()
        self.is_here = here

    def release(self) -> None:
        """On rank 0, when all ranks' models are away."""
        if self.turn is not None:
            self.turn.release()


@dataclass(eq=False)
class SharedDevice:
    """The training component's side, on every rank; `turn` is rank 0's. The `model` leaves and comes back with it."""

    turn: Turn
    progress: Progress
    _: KW_ONLY
    timeout_seconds: float
    model: Movable | None = None

    def take(self) -> None:
        """Wait for the turn; no rank uses the device before. Raises ServerTimeout."""
        from_rank_0(lambda: self.turn.take(self.timeout_seconds))

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """In the block the servers can compute, and this component only waits for them. Errors in it are raised on every rank."""
        assert self.model is not None
        self.model.leave_device()
        platform.release_cached()
        raise_everywhere(None)  # every rank's memory is free
        self.turn.release()
        error: AlignerError | None = None
        try:
            with self.progress.phase(WAIT_FOR_SERVERS):
                yield
        except AlignerError as raised:  # a checkpoint may be saved yet
            error = raised
        with self.progress.phase(WAIT_FOR_SERVERS):
            self.take()
        self.model.enter_device()
        if error is not None:
            raise error
