"""A gate between two threads of a rank: one generates; the other holds it between two steps to give it new weights.

Generations run in a thread, one after the other. The main thread announces how many will run (`expect`), the thread reports the end of each
(`ended`), and the generation checks before its steps whether it is held (`between_steps`). So the main thread knows whether the other one
stands between two steps or has nothing left to do.

The ranks of a replica generate in step and must take new weights before the same step. The leading rank decides and informs the others
before each step, over a group that has no other use (two threads must never share one). A replica of one rank sends no messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from aligner.errors import EngineError
from aligner.parallel.collectives import leaders_integers

_STOP = -1


class Stopped(EngineError):
    """The generation was stopped early, on purpose."""


class Gate:
    """The shared state of the two threads. `group`: the ranks of the replica, for tensors on the CPU; None for a single rank.

    `timeout_seconds`: time allowed for a step, for the expected generations, and for a hold to end.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 3600.0) -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._expected = self._ended = 0  # generations
        self._wanted = self._released = 0  # holds, counted by the main thread
        self._standing = 0  # the hold in which the generation stands or last stood
        self._version = 0  # of the weights since the last hold
        self._broken = ""  # why the weights are not whole
        self._is_over = False

    def expect(self, count: int = 1) -> None:
        """Announce `count` more generations in the thread. From the main thread, at the same points on all ranks."""
        with self._changed:
            self._expected += count

    def ended(self) -> None:
        """The thread has finished a generation, with or without success."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def hold(self) -> None:
        """Wait until the thread stands between two steps or has nothing to do; `release` lets it continue. From the main thread, on all
        ranks of the component. Raises EngineError if the thread's step does not end in time."""
        with self._changed:
            self._wanted += 1
            self._wait("a step of the generation in the background to end", lambda: self._standing == self._wanted or self._is_idle)

    def release(self, version: int, broken: str = "") -> None:
        """Let the generation continue with weights of `version`, or end with an EngineError if they are `broken`."""
        with self._changed:
            self._released, self._version, self._broken = self._wanted, version, broken
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until the thread has run all expected generations. Raises EngineError if it does not in time."""
        with self._changed:
            self._wait("the generations in the background to end", lambda: self._is_idle)

    def stop(self) -> None:
        """End all generations with `Stopped` from now on, a running one before its next step. On all ranks of a replica."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def between_steps(self, settle: Callable[[], None]) -> int | None:
        """The generation is between two steps: if held, it stands here, after `settle` has finished the work under way.

        Returns the version of new weights, None if they did not change. All ranks of the replica call it at the same points. Raises
        Stopped, and EngineError if the weights are broken or the hold does not end in time.
        """
        number = _STOP if self._is_over else self._wanted
        if self._group is not None:
            (number,) = leaders_integers((number,), group=self._group, device=torch.device("cpu"))
        if number == _STOP:
            raise Stopped("the generation in the background was stopped")
        if number == self._standing:
            return None
        settle()
        with self._changed:
            self._standing = number
            self._changed.notify_all()
            self._wait("new weights for the generation in the background", lambda: self._released >= number)
            if self._broken:
                raise EngineError(f"the generation in the background has no whole weights to continue with: {self._broken}")
            return self._version

    @property
    def _is_idle(self) -> bool:
        return self._ended == self._expected

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, self._timeout_seconds):
            raise EngineError(f"waited {self._timeout_seconds:g} s for {what} (rollout.asynchronous.timeout_seconds)")
