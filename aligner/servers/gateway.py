"""The network front of a server: admits the run's own requests, checks their form, and passes them on (see `intake`).

It speaks the KServe v2 protocol (JSON and Triton's binary tensors), and of that only health, metadata and inference. It runs in a thread of
rank 0's process with an event loop of its own.

The run's own requests always find a place, whatever anybody else opens (`Seats`). A connection is a stranger's until a request with the
run's secret has come over it. Strangers have few seats, and STRANGER_SECONDS from the connection to a whole header with the secret. If the
seats are taken, the oldest stranger of the address that has most of them has to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import ssl
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import aiohttp
from aiohttp import web

from aligner.errors import ConfigError, ServerError
from aligner.servers.access import Access, listen
from aligner.servers.config import RequestLimits, ServerConfig
from aligner.servers.health import Health
from aligner.servers.intake import Upstream, computed
from aligner.servers.kserve import DATATYPES, HEADER_LENGTH, AnswerError, body_limit, read_request
from aligner.servers.wire import Endpoint
from aligner.version import __version__

STRANGERS = 256
STRANGER_SECONDS = 5.0
OTHER_FILES = 512  # that the process may have open besides connections
_AT_ONCE = 16  # connections accepted before the existing ones are served again
_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0  # minimum time between repeated warnings
_BUSY_SECONDS = 0.1  # before the next try if the machine has no room for a connection


class _Seat:
    """One connection, and what ends it."""

    __slots__ = ("address", "since", "connection", "task", "transport")

    def __init__(self, address: str, connection: socket.socket) -> None:
        self.address = address
        self.since = time.monotonic()
        self.connection = connection
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None

    def clear(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def opened(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before it begins closes nothing."""
        if task.cancelled():
            self.connection.close()


class Server(web.Server):
    """aiohttp's, with a callback at the end of a connection."""

    def __init__(self, handle: Callable, ended: Callable[[web.RequestHandler], None], **settings: object) -> None:
        super().__init__(handle, **settings)
        self._ended = ended

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._ended(handler)


class Seats:
    """Accepts the connections of a listening socket. All of it runs in one event loop."""

    def __init__(self, max_connections: int, tls: ssl.SSLContext | None) -> None:
        self._max_trusted = max_connections
        self._tls = tls
        self._strangers: dict[web.RequestHandler, _Seat] = {}  # oldest first
        self._trusted: set[web.RequestHandler] = set()

    async def accept(self, listener: socket.socket, handler: Callable[[], web.RequestHandler]) -> None:
        """For good: every connection gets a handler of its own."""
        loop = asyncio.get_running_loop()
        looking = loop.create_task(self._show_out_the_late())
        taken, told = 0, float("-inf")
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:  # too many files are open, on this machine or here
                    if time.monotonic() - told >= _TELL_SECONDS:
                        told = time.monotonic()
                        print(f"gateway: cannot take a connection: {error}", file=sys.stderr, flush=True)
                    self._show_out()
                    await asyncio.sleep(_BUSY_SECONDS)
                    continue
                self._enter(handler(), connection, address[0])
                taken += 1
                if taken % _AT_ONCE == 0:  # `sock_accept` does not wait if a connection is ready
                    await asyncio.sleep(0)
        finally:
            looking.cancel()

    def trust(self, handler: web.RequestHandler) -> bool:
        """Mark a connection that has shown the secret; False if too many have, or the connection has ended meanwhile."""
        if handler in self._trusted:
            return True
        if handler not in self._strangers or len(self._trusted) >= self._max_trusted:
            return False
        del self._strangers[handler]
        self._trusted.add(handler)
        return True

    def leave(self, handler: web.RequestHandler) -> None:
        """The connection has ended."""
        self._strangers.pop(handler, None)
        self._trusted.discard(handler)

    def _enter(self, handler: web.RequestHandler, connection: socket.socket, address: str) -> None:
        if len(self._strangers) >= STRANGERS:
            self._show_out()
        seat = self._strangers[handler] = _Seat(address, connection)
        seat.task = asyncio.get_running_loop().create_task(self._open(handler, seat))
        seat.task.add_done_callback(seat.opened)

    async def _open(self, handler: web.RequestHandler, seat: _Seat) -> None:
        """Shake hands, if TLS is spoken, and leave the rest to the handler."""
        loop = asyncio.get_running_loop()
        settings = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": STRANGER_SECONDS}
        try:
            seat.transport, _ = await loop.connect_accepted_socket(lambda: handler, seat.connection, **settings)
        except (OSError, asyncio.CancelledError):  # it has no certificate, has left, or was shown out
            seat.connection.close()
            self.leave(handler)

    def _show_out(self) -> None:
        """End the oldest stranger of the address that has most."""
        for address, _ in Counter(seat.address for seat in self._strangers.values()).most_common(1):
            self._strangers.pop(next(handler for handler, seat in self._strangers.items() if seat.address == address)).clear()

    async def _show_out_the_late(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            latest = time.monotonic() - STRANGER_SECONDS
            for handler in [handler for handler, seat in self._strangers.items() if seat.since < latest]:
                self._strangers.pop(handler).clear()


def allow_files(max_connections: int) -> str:
    """Raise this process's limit on open files if necessary; why the connections would not fit, empty if they do."""
    wanted = max_connections + STRANGERS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return (
            f"this process may open {hard} files (ulimit -Hn); {wanted} are needed: {max_connections} connections, {STRANGERS} of strangers"
        )
    with contextlib.suppress(ValueError):  # the hard limit was lowered meanwhile
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ""


START_SECONDS = 30.0
IDLE_CONNECTION_SECONDS = 60.0  # of a client that has shown the secret; others: STRANGER_SECONDS
LINGER_SECONDS = 2.0  # keep draining a refused request this long, so that its sender can read the answer
RETRY_SECONDS = 1
ANSWER_SECONDS = 2.0  # for the answers that are ready, when it ends
LOG_SECONDS = 10.0  # minimum time between reports of refusals without the secret

SERVER = "aligner"

Route = Callable[[web.BaseRequest], Awaitable[web.Response]]


class Refusal(Exception):
    """An error answer: its HTTP status, its message, and headers to go with it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class HttpThread(ABC):
    """An HTTP server in a thread with an event loop of its own, which it shares with nothing else: `name` in messages."""

    name: str
    drain_seconds = ANSWER_SECONDS  # for what is under way, when it ends

    def __init__(self, config: ServerConfig, access: Access) -> None:
        """Raises ServerError if the address or port cannot be used, ConfigError if max_connections exceeds the limit of open files."""
        if problem := allow_files(config.max_connections):
            raise ConfigError(f"server.max_connections={config.max_connections}: {problem}")
        self._config, self._access = config, access
        self._listener = listen(config.host, config.port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._seats = Seats(config.max_connections, access.tls)
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Return when it answers. Raises ServerError if it cannot."""
        self._thread.start()
        if not self._started.wait(START_SECONDS) or self._error is not None:
            raise ServerError(f"the {self.name} on port {self.port} did not start: {self._error or f'waited {START_SECONDS:.0f} s'}")

    def failure(self) -> str | None:
        """Why it no longer answers; None while all is well. From any thread."""
        return None if self._thread.is_alive() else f"the {self.name} ended: {self._error}"

    def stop(self) -> None:
        """Send the answers that are ready, then close everything. Callable more than once."""
        if self._started.is_set() and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(self.drain_seconds + 5.0)
        self._listener.close()

    # ---- the event loop's thread

    @abstractmethod
    async def _open(self, **settings: object) -> web.Server:
        """The server that handles requests, whose connections leave their seats when they end."""

    @abstractmethod
    async def _close(self, server: web.Server) -> None:
        """Let what is under way end, and close the server."""

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            traceback.print_exc(file=sys.stderr)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        logger = logging.getLogger(f"aligner.{self.name}")
        logger.setLevel(logging.CRITICAL)  # errors of requests go to their senders, and our own are printed here
        server = await self._open(
            access_log=None,
            logger=logger,
            keepalive_timeout=IDLE_CONNECTION_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
        )
        accepting = self._loop.create_task(self._seats.accept(self._listener, server))
        accepting.add_done_callback(lambda _: self._stopping.set())  # it ends only after an error of ours
        self._started.set()
        await self._stopping.wait()
        if accepting.done():
            accepting.result()
        accepting.cancel()
        await self._close(server)


class Gateway(HttpThread):
    """The HTTP server of one critic or reward server. It answers once started; requests are accepted after `connect`."""

    name = "gateway"

    def __init__(self, config: ServerConfig, access: Access, endpoints: Sequence[Endpoint], limits: RequestLimits, health: Health) -> None:
        super().__init__(config, access)
        self._limits = limits
        self._health = health
        self._routes = self._make_routes(endpoints)
        self._upstream: Upstream | None = None
        self._waiting = 0
        self._pending_bytes = 0
        self._sent: dict[object, float] = {}  # when each request that is not answered was passed on
        self._refused, self._reported_at = 0, float("-inf")

    def connect(self, upstream: Upstream) -> None:
        """Accept requests from now on, for `upstream`, which is closed with this."""
        self._upstream = upstream

    def failure(self) -> str | None:
        """As above, or why no request gets through."""
        return super().failure() or self._health.stuck(self._oldest_seconds())

    async def _open(self, **settings: object) -> web.Server:
        return Server(self._handle, self._seats.leave, **settings)

    async def _close(self, server: web.Server) -> None:
        await server.shutdown(ANSWER_SECONDS)
        if self._upstream is not None:
            await self._upstream.close()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        try:
            return await self._routed(request)
        except Refusal as refusal:
            answer = _json({"error": str(refusal)}, refusal.status, refusal.headers)
            if "Connection" in refusal.headers:
                answer.force_close()  # the header alone would leave that to the client
            return answer
        except ConnectionError:
            raise  # the client has left
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return _json({"error": "internal error; see the server's log"}, 500)

    async def _routed(self, request: web.BaseRequest) -> web.Response:
        path = request.raw_path.partition("?")[0]  # as sent: nothing is decoded or resolved on the way to a route
        if path == "/v2/health/live" and request.method == "GET":
            return _json({"live": True})
        if not self._access.admits(request.headers.get("Authorization")):
            self._report_refusal(request)
            message = "the run's secret is missing or wrong: send `Authorization: Bearer <secret>`"
            raise Refusal(401, message, {"WWW-Authenticate": "Bearer", "Connection": "close"})
        if not self._seats.trust(request.protocol):
            message = f"{self._config.max_connections} connections are open (server.max_connections); try again"
            raise Refusal(429, message, {"Retry-After": str(RETRY_SECONDS), "Connection": "close"})
        if path not in self._routes:
            raise Refusal(404, f"{path[:100]!r} is not served; allowed are {', '.join(self._routes)}")
        method, route = self._routes[path]
        if request.method != method:
            raise Refusal(405, f"{path}: {method} only", {"Allow": method})
        return _json(route) if isinstance(route, dict) else await route(request)

    def _make_routes(self, endpoints: Sequence[Endpoint]) -> dict[str, tuple[str, Route | dict[str, object]]]:
        routes: dict[str, tuple[str, Route | dict[str, object]]] = {
            "/v2": ("GET", {"name": f"aligner {self._health.name}", "version": __version__, "extensions": ["binary_tensor_data"]}),
            "/v2/health/live": ("GET", {"live": True}),
            "/v2/health/ready": ("GET", self._ready),
        }
        for endpoint in endpoints:
            path = f"/v2/models/{endpoint.name}"
            routes[path] = ("GET", _metadata(endpoint))
            routes[f"{path}/ready"] = ("GET", self._ready)
            routes[f"{path}/infer"] = (
                "POST",
                self._inference(endpoint, min(body_limit(endpoint, self._limits), self._config.max_request_bytes)),
            )
        return routes

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        report = self._health.report(self._waiting, self._oldest_seconds())
        return _json(report, 200 if report["ready"] else 503)

    def _oldest_seconds(self) -> float:
        """How long ago the oldest request that is not answered was passed on; 0 if none waits."""
        sent = list(self._sent.values())  # at once: another thread may be adding to it
        return time.monotonic() - sent[0] if sent else 0.0

    def _inference(self, endpoint: Endpoint, largest: int) -> Route:
        async def infer(request: web.BaseRequest) -> web.Response:
            with self._admitted(_content_length(request, largest)) as size:
                body = await self._body(request, size)
                header_length = request.headers.get(HEADER_LENGTH)
                try:
                    inbound = await computed(size, read_request, endpoint, self._limits, header_length, body)
                except ValueError as error:
                    raise Refusal(400, f"{endpoint.name}: {error}") from error
                place = object()
                self._sent[place] = time.monotonic()
                try:
                    headers, answer = await self._upstream.ask(endpoint, inbound)
                except AnswerError as error:
                    raise Refusal(error.status, error.message) from error
                finally:
                    del self._sent[place]
                return web.Response(body=answer, headers={"Server": SERVER, **headers})

        return infer

    @contextlib.contextmanager
    def _admitted(self, size: int) -> Iterator[int]:
        """A place for one request of `size` bytes. Raises Refusal if all are taken."""
        failure = self._health.failure()
        if self._upstream is None or failure is not None:
            raise Refusal(503, failure or "it is starting", {"Retry-After": str(RETRY_SECONDS)})
        if self._waiting >= self._config.max_requests or self._pending_bytes + size > self._config.max_pending_bytes:
            raise Refusal(
                429,
                f"{self._waiting} requests with {self._pending_bytes} bytes are waiting (server.max_requests={self._config.max_requests}, "
                f"server.max_pending_bytes={self._config.max_pending_bytes}); try again",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        self._waiting += 1
        self._pending_bytes += size
        try:
            yield size
        finally:
            self._waiting -= 1
            self._pending_bytes -= size

    async def _body(self, request: web.BaseRequest, size: int) -> bytearray:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            await asyncio.wait_for(_receive(request, body), self._config.body_timeout_seconds)
        except asyncio.TimeoutError as error:
            limit = self._config.body_timeout_seconds
            raise Refusal(408, f"{len(body)} of {size} bytes came in {limit:g} s (server.body_timeout_seconds)") from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise ConnectionResetError("the body ended early") from error
        return body

    def _report_refusal(self, request: web.BaseRequest) -> None:
        self._refused += 1
        if time.monotonic() - self._reported_at >= LOG_SECONDS:
            print(
                f"gateway: {self._refused} request(s) without the run's secret refused, the last from {request.remote}",
                file=sys.stderr,
                flush=True,
            )
            self._refused, self._reported_at = 0, time.monotonic()


def _content_length(request: web.BaseRequest, largest: int) -> int:
    """The stated length of a body that may be read. Raises Refusal otherwise."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise Refusal(415, f"Content-Encoding {encoding[:40]!r}: send the body uncompressed")
    size = request.content_length
    if size is None:
        raise Refusal(411, "send the body with a Content-Length")
    if size > largest:
        raise Refusal(413, f"the body has {size} bytes; at most {largest} are allowed (server.max_request_bytes and the model's limits)")
    return size


async def _receive(request: web.BaseRequest, into: bytearray) -> None:
    async for chunk in request.content.iter_any():
        into += chunk


def _json(document: dict[str, object], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    named = {"Server": SERVER, **(headers or {})}
    return web.Response(body=json.dumps(document).encode(), status=status, headers=named, content_type="application/json")


def _metadata(endpoint: Endpoint) -> dict[str, object]:
    """KServe's description of a model; sizes that a request chooses are -1."""
    sizes = {spec.name: [size if isinstance(size, int) else -1 for size in spec.shape] for spec in (*endpoint.inputs, *endpoint.outputs)}
    described = {
        kind: [{"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": sizes[spec.name]} for spec in specs]
        for kind, specs in (("inputs", endpoint.inputs), ("outputs", endpoint.outputs))
    }
    return {"name": endpoint.name, "versions": ["1"], "platform": "aligner", **described}
