"""The way of a request from the gateway to the queue: straight, in this process, or through Triton's Unix socket (`server.transport`).

Either gets requests whose form has been checked, ends in `Intake.submit`, and gives the same answers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
import numpy as np

from aligner.servers.inbound import Inbound, outbound
from aligner.servers.kserve import HEADER_LENGTH, AnswerError, decode_failure, encode_response
from aligner.servers.wire import Endpoint

CONNECT_SECONDS = 10.0
LARGE_BYTES = 256 * 1024  # larger bodies are taken apart in another thread, and sent on without a copy
SEND_BYTES = 1 << 20

Submit = Callable[[Endpoint, Mapping[str, np.ndarray]], "Future[dict[str, np.ndarray]]"]
T = TypeVar("T")


async def computed(size: int, call: Callable[..., T], *arguments: object) -> T:
    """The call's result; one about many bytes runs in another thread, so that other requests are answered meanwhile."""
    return call(*arguments) if size < LARGE_BYTES else await asyncio.to_thread(call, *arguments)


class Upstream(Protocol):
    """What is behind the gateway, whose event loop calls it."""

    async def ask(self, endpoint: Endpoint, request: Inbound) -> tuple[dict[str, str], bytes]:
        """Headers and body of the answer. Raises AnswerError with the reason of another answer than 200."""

    async def close(self) -> None:
        """Nothing is asked any more."""


class Straight:
    """`submit` is called in this process."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    async def ask(self, endpoint: Endpoint, request: Inbound) -> tuple[dict[str, str], bytes]:
        """See `Upstream`."""
        future = await computed(request.nbytes, lambda: self._submit(endpoint, request.arrays()))
        arrays = await asyncio.wrap_future(future)
        named = {"id": request.request_id} if request.request_id else {}
        size = sum(array.nbytes for array in arrays.values())
        return await computed(size, lambda: encode_response(arrays, request.outputs, **named, model_name=endpoint.name, model_version="1"))

    async def close(self) -> None:
        """There is nothing to close."""


class ThroughTriton:
    """Triton listens on the Unix socket `path`; PyTriton's threads call `submit`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, endpoint: Endpoint, request: Inbound) -> tuple[dict[str, str], bytes]:
        """See `Upstream`. Triton's own words may hold tracebacks and go to the log."""
        header, tensors = outbound(request)
        size = len(header) + request.nbytes
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "Accept-Encoding": "identity",  # Triton compresses otherwise, which is ten times slower
            HEADER_LENGTH: str(len(header)),
        }
        body_out = b"".join([header, *tensors]) if size < LARGE_BYTES else _pieces(header, tensors)
        url = f"http://triton/v2/models/{endpoint.name}/infer"
        try:
            async with self._opened().post(url, data=body_out, headers=headers) as response:
                status, body, answered = response.status, await response.read(), response.headers
        except (aiohttp.ClientError, OSError) as error:
            print(f"gateway: {endpoint.name}: Triton broke off: {error}", file=sys.stderr, flush=True)
            raise AnswerError(f"{endpoint.name}: Triton broke off; whether the operation ran is unknown", status=502) from error
        if status == 200:
            return {name: answered[name] for name in (HEADER_LENGTH, "Content-Type") if name in answered}, body
        ours, message = decode_failure(body)
        if ours is None:
            print(f"gateway: {endpoint.name}: Triton answered: {message}", file=sys.stderr, flush=True)
            raise AnswerError(f"{endpoint.name}: Triton could not answer; see the server's log", status=502)
        raise AnswerError(message, status=ours)

    async def close(self) -> None:
        """Close the connections to Triton."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # what may run for how long is the client's to say
            connector = aiohttp.UnixConnector(str(self._path), limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._session


async def _pieces(header: bytes, tensors: Sequence[memoryview]) -> AsyncIterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        for start in range(0, tensor.nbytes, SEND_BYTES):
            yield tensor[start : start + SEND_BYTES]
