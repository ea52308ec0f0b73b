"""Calls user code outside the caller's thread: a limited number at a time, each with a time limit; none can block process exit.

A thread cannot be killed. An overdue one is abandoned: it is a daemon, its result is dropped, and the next call begins.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from aligner.rewards.load import position


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of the call with this key. `late`: its position in the code at the timeout, without value or error."""

    key: int
    value: Any = None
    error: BaseException | None = None
    late: str = ""


@dataclass(slots=True, eq=False)
class _Call:
    key: int
    action: Callable[[], Any]
    thread: threading.Thread | None = None
    started: float = 0.0


class Workers:
    """`num_workers` calls at a time, first come first served. `submit`, `outcomes` and `close` are for one thread."""

    def __init__(self, *, num_workers: int, timeout_seconds: float, name: str) -> None:
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_pending = 0

    def submit(self, key: int, action: Callable[[], Any]) -> None:
        """Call `action` as soon as a worker is free."""
        with self._lock:
            self._num_pending += 1
            self._waiting.append(_Call(key, action))
            self._start_waiting()

    def outcomes(self, wait_seconds: float) -> list[Outcome]:
        """Ended and overdue calls. Without any, waits up to this long for the first one, if a call is running."""
        deadline = time.monotonic() + wait_seconds
        while True:
            found = self._ended() + self._overdue()
            self._num_pending -= len(found)
            left = deadline - time.monotonic()
            if found or not self._num_pending or left <= 0:
                return found
            with self._lock:
                first = min((call.started for call in self._running), default=time.monotonic())
            try:
                outcome = self._outcomes.get(timeout=max(0.0, min(left, first + self._timeout_seconds - time.monotonic())))
            except queue.Empty:
                continue
            self._num_pending -= 1
            return [outcome]

    def close(self) -> None:
        """Drop waiting calls; running ones continue, their results are ignored."""
        with self._lock:
            self._waiting.clear()
            self._running.clear()
            self._num_pending = 0

    def _start_waiting(self) -> None:
        """With the lock held."""
        while self._waiting and len(self._running) < self._num_workers:
            call = self._waiting.popleft()
            call.started = time.monotonic()
            self._running.add(call)
            call.thread = threading.Thread(target=self._work, args=(call,), name=self._name, daemon=True)
            call.thread.start()

    def _work(self, call: _Call) -> None:
        try:
            outcome = Outcome(key=call.key, value=call.action())
        except BaseException as error:  # handed to the waiting thread, which raises it
            outcome = Outcome(key=call.key, error=error)
        with self._lock:
            if call in self._running:  # else it was abandoned
                self._running.discard(call)
                self._outcomes.put(outcome)
                self._start_waiting()

    def _ended(self) -> list[Outcome]:
        return [self._outcomes.get_nowait() for _ in range(self._outcomes.qsize())]  # nobody else takes any

    def _overdue(self) -> list[Outcome]:
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._running if now - call.started >= self._timeout_seconds]
            self._running.difference_update(late)
            self._start_waiting()
        return [Outcome(key=call.key, late=_position(call.thread)) for call in sorted(late, key=lambda call: call.key)]


class Awaiting:
    """One event loop for all coroutines of a run, in its own thread, so that they may share a connection. Starts at the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def settle(self, value: Any, timeout_seconds: float | None) -> Any:
        """The value, or the result of awaiting it, cancelled on timeout. From any thread but the loop's."""
        if not inspect.isawaitable(value):
            return value
        future = self.begin(value)
        try:
            return future.result(timeout_seconds)
        finally:
            future.cancel()

    def begin(self, value: Awaitable[Any]) -> Future[Any]:
        """Await it in the loop."""
        return asyncio.run_coroutine_threadsafe(_await(value), self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop


async def _await(awaitable: Awaitable[Any]) -> Any:
    """Any awaitable as a coroutine, the only thing that an event loop accepts from other threads."""
    try:
        return await awaitable
    except SystemExit as error:  # it would end the loop's thread and everything else awaited there
        raise RuntimeError(f"the coroutine ended with {error!r}") from error


def _position(thread: threading.Thread | None) -> str:
    """What a running thread is doing."""
    text, stack = position(thread)
    return "awaiting what it returned" if any(one.filename == __file__ and one.name == "settle" for one in stack) else text
