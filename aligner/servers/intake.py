"""The path of a request on rank 0 behind the gateway, and Triton if there is one: checked, queued, taken by the main thread, answered."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np

from aligner.servers.config import RequestLimits
from aligner.servers.kserve import AnswerError
from aligner.servers.wire import Endpoint, Payload, Result
from aligner.telemetry import recording

Answer = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """`handler` runs on every rank with the same payload; its result on rank 0 is the answer.

    `check` may raise ValueError to reject a payload; it runs on rank 0 only, in another thread, before any rank computes. An operation that
    does not itself compute (`computes`) needs no model on the device.
    """

    endpoint: Endpoint
    handler: Callable[[Payload], Result]
    check: Callable[[Payload], None] | None = None
    computes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One accepted request and the answer that its client waits for."""

    operation: Operation
    payload: Payload
    answer: Future[Answer] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)  # on this process's clock


class Intake:
    """Accepted requests in order of arrival; shared by the threads of the transport, the main thread and the supervisor."""

    def __init__(self, operations: Mapping[str, Operation], limits: RequestLimits) -> None:
        self._operations = operations
        self._limits = limits
        self._tickets: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: AnswerError | None = None
        self._running: Ticket | None = None

    def submit(self, endpoint: Endpoint, arrays: Mapping[str, np.ndarray]) -> Future[Answer]:
        """Check and queue a request; the future holds the reply's tensors, or the reason of the rejection.

        The form of what the gateway let through has been checked there; `Endpoint.payload` checks what its numbers mean.
        """
        operation = self._operations[endpoint.name]
        try:
            payload = endpoint.payload(arrays, self._limits)
            if operation.check is not None:
                operation.check(payload)
        except ValueError as error:
            print(f"server: rejected {endpoint.name}: {error}", file=sys.stderr, flush=True)
            return _failed(AnswerError(f"{endpoint.name}: {error}", status=400))
        ticket = Ticket(operation=operation, payload=payload)
        with self._lock:
            if self._closed is not None:
                return _failed(self._closed)
            self._tickets.put(ticket)
        return ticket.answer

    def take(self, timeout_seconds: float) -> Ticket | None:
        """The next request, or None if none came; it counts as running until the next call."""
        try:
            self._running = self._tickets.get(timeout=timeout_seconds)
        except queue.Empty:
            self._running = None
        return self._running

    def answer(self, ticket: Ticket, answer: Answer | AnswerError) -> None:
        """Send the reply to a request that was taken, or the reason of its refusal."""
        recording.add(ticket.operation.endpoint.name, ticket.since, "requests")
        with contextlib.suppress(InvalidStateError):  # its client has gone, or the supervisor has answered for a loop that hung
            if isinstance(answer, AnswerError):
                ticket.answer.set_exception(answer)
            else:
                ticket.answer.set_result(answer)

    def close(self, error: AnswerError) -> None:
        """Answer everything that waits or runs, and all that comes later, with `error`. Callable from any thread, more than once."""
        with self._lock:
            self._closed = self._closed or error
            waiting = [self._running] if self._running is not None else []
            while not self._tickets.empty():
                waiting.append(self._tickets.get())
        for ticket in waiting:
            with contextlib.suppress(InvalidStateError):  # answered already
                ticket.answer.set_exception(error)


def _failed(error: AnswerError) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_exception(error)
    return future
