"""Daemon threads that run calls in order: unlike a ThreadPoolExecutor's they never keep a process from exiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class WorkerThreads:
    """`num_threads` threads over one queue; with one thread calls run strictly in the order of submission."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; the future has its result or what it raised."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, timeout_seconds: float) -> None:
        """End the threads once the queue is empty; waits at most `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # it belongs to whoever awaits the future
                future.set_exception(error)
            else:
                future.set_result(result)


def combine(futures: list[Future], join: Callable[[list], T]) -> Future[T]:
    """A future of `join(results)`, in the order of `futures`; the first of them to fail makes it fail at once."""
    combined: Future[T] = Future()
    combined.set_running_or_notify_cancel()
    lock = threading.Lock()
    left = len(futures)

    def done(future: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if combined.done():
                return
            try:
                future.result()
                if left == 0:
                    combined.set_result(join([part.result() for part in futures]))
            except BaseException as error:  # raised again by the combined future's result()
                combined.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return combined
