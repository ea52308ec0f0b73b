"""A request's path behind the gateway: straight or through Triton's Unix socket (`server.transport`) into the queue, and answered."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np

from aligner.servers.config import RequestLimits
from aligner.servers.kserve import HEADER_LENGTH, AnswerError, Inbound, decode_failure, encode_response, outbound
from aligner.servers.wire import Endpoint, Payload, Result
from aligner.telemetry import recording

Answer = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """`handler` runs on every rank; `check`, on rank 0, may raise ValueError. Only if `computes` is the model needed."""

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
        """Check the meaning of a request, after its form in the gateway, and queue it; the future holds the reply or the error."""
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
        with contextlib.suppress(InvalidStateError):  # its client has left, or the supervisor has answered for a loop that hung
            if isinstance(answer, AnswerError):
                ticket.answer.set_exception(answer)
            else:
                ticket.answer.set_result(answer)

    def close(self, error: AnswerError) -> None:
        """Answer every waiting, running and later request with `error`. Callable from any thread, more than once."""
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


CONNECT_SECONDS = 10.0
LARGE_BYTES = 256 * 1024  # larger bodies are parsed in another thread, and sent on without a copy
SEND_BYTES = 1 << 20

Submit = Callable[[Endpoint, Mapping[str, np.ndarray]], "Future[dict[str, np.ndarray]]"]
T = TypeVar("T")


async def computed(size: int, call: Callable[..., T], *arguments: object) -> T:
    """The call's result; one about many bytes runs in another thread, so that other requests are answered meanwhile."""
    return call(*arguments) if size < LARGE_BYTES else await asyncio.to_thread(call, *arguments)


class Straight:
    """Behind the gateway, whose event loop calls it: `submit` is called in this process."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    async def ask(self, endpoint: Endpoint, request: Inbound) -> tuple[dict[str, str], bytes]:
        """Headers and body of the answer. Raises AnswerError with the reason of another answer than 200."""
        future = await computed(request.nbytes, lambda: self._submit(endpoint, request.arrays()))
        arrays = await asyncio.wrap_future(future)
        named = {"id": request.request_id} if request.request_id else {}
        size = sum(array.nbytes for array in arrays.values())
        return await computed(size, lambda: encode_response(arrays, request.outputs, **named, model_name=endpoint.name, model_version="1"))

    async def close(self) -> None:
        """Holds nothing."""


class ThroughTriton:
    """Behind the gateway too: Triton listens on the Unix socket `path`; PyTriton's threads call `submit`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, endpoint: Endpoint, request: Inbound) -> tuple[dict[str, str], bytes]:
        """As `Straight`. Triton's own error texts may hold tracebacks and go to the log."""
        headers, header, tensors = outbound(request)
        size = len(header) + request.nbytes
        headers["Content-Length"] = str(size)
        body_out = b"".join([header, *tensors]) if size < LARGE_BYTES else _pieces(header, tensors)
        url = f"http://triton/v2/models/{endpoint.name}/infer"
        try:
            async with self._opened().post(url, data=body_out, headers=headers) as response:
                status, body, answered = response.status, await response.read(), response.headers
        except (aiohttp.ClientError, OSError) as error:
            print(f"gateway: {endpoint.name}: Triton closed the connection: {error}", file=sys.stderr, flush=True)
            raise AnswerError(f"{endpoint.name}: Triton closed the connection; whether the operation ran is unknown", status=502) from error
        if status == 200:
            return {name: answered[name] for name in (HEADER_LENGTH, "Content-Type") if name in answered}, body
        ours, message = decode_failure(body)
        if ours is None:
            print(f"gateway: {endpoint.name}: Triton answered: {message}", file=sys.stderr, flush=True)
            raise AnswerError(f"{endpoint.name}: Triton could not answer; see the server's log", status=502)
        raise AnswerError(message, status=ours)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # the client decides how long an operation may take
            connector = aiohttp.UnixConnector(str(self._path), limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._session


Upstream = Straight | ThroughTriton


async def _pieces(header: bytes, tensors: Sequence[memoryview]) -> AsyncIterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        for start in range(0, tensor.nbytes, SEND_BYTES):
            yield tensor[start : start + SEND_BYTES]
