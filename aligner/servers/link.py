"""One client's way to its server: discovery, one HTTP exchange at a time per thread, and prompt notice of the server's death.

Every exchange opens a new connection, in well under a millisecond: one that died while idle can never be mistaken for a server that died
while training. While an answer is awaited, the registration is watched.

`Recovery` survives the loss of a server: it waits for another one of the same name, brings it up to date, and asks again. Requests must be
harmless to repeat: inference is; training is, because the server's ledger records the applied ones.

`WorkerThreads` are daemon threads that run calls in order: unlike a ThreadPoolExecutor's they never keep a process from exiting.
"""

from __future__ import annotations

import http.client
import queue
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from aligner.errors import RequestRejected, ServerError, ServerTimeout, ServerUnreachable
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig
from aligner.servers.kserve import HEADER_LENGTH, decode_error, decode_response, encode_request
from aligner.servers.ledger import Reason
from aligner.servers.registry import POLL_SECONDS, Liveness, Registration, gone_path, registration_path, wait_for_service
from aligner.servers.wire import Endpoint
from aligner.telemetry import recording

T = TypeVar("T")

BUSY, REFUSED = 429, 409
LOST = (408, 500, 502, 503)  # the server or its Triton is ending; whether the operation ran is unknown


@dataclass(frozen=True, slots=True)
class Server:
    """One incarnation of a server, with its liveness check."""

    registration: Registration
    liveness: Liveness


class RequestRefused(RequestRejected):
    """The server refused a request because of what it was trained on, and changed nothing; `reason` is one of `ledger.Reason`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        found = re.search(r"refused \((\w+)\)", message)
        self.reason = found[1] if found else ""


class ServiceLink:
    """Finds servers of one name, of the attempt `attempt` ("": of any). Thread-safe. If `is_talkative`, prints what it waits for."""

    def __init__(
        self, services_dir: Path, name: str, config: ClientConfig, *, access: Access, attempt: str = "", is_talkative: bool = False
    ) -> None:
        self._services_dir = services_dir
        self._name = name
        self._config = config
        self._access = access
        self._attempt = attempt
        self._tell = partial(print, flush=True) if is_talkative else None
        self._answered_at: float | None = None
        self._closed = threading.Event()

    def find(self, timeout_seconds: float) -> Server:
        """A server that is ready; waits at most this long. Raises ServerUnreachable."""
        registration = wait_for_service(
            self._services_dir,
            self._name,
            timeout_seconds=timeout_seconds,
            heartbeat_timeout_seconds=self._config.heartbeat_timeout_seconds,
            attempt=self._attempt,
            abandoned=self._closed,
            tell=self._tell,
        )
        path = registration_path(self._services_dir, self._name)
        return Server(registration, Liveness(path, registration, self._config.heartbeat_timeout_seconds))

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_gone(self) -> bool:
        """Whether a launcher has recorded that nobody will start this server again."""
        return gone_path(self._services_dir, self._name).exists()

    def close(self) -> None:
        """Calls under way end with ServerUnreachable within a fraction of a second."""
        self._closed.set()

    def pause(self, seconds: float) -> None:
        """Sleep, at most until this client is closed."""
        self._closed.wait(seconds)

    def call(self, server: Server, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        """One exchange. A server that is too busy to take the request is asked again.

        Raises:
            ServerUnreachable: a dead or ending server, a broken connection; whether the operation ran is then unknown.
            ServerTimeout: no answer in time.
            RequestRefused: the request does not fit the server's training history.
            RequestRejected: the server's error message.
        """
        registration, what = server.registration, endpoint.name
        deadline = time.monotonic() + timeout_seconds
        with recording.span(what, recording.rank_lane(f"calls to {self._name}")):
            request = ("POST", f"/v2/models/{what}/infer", *encode_request(inputs, endpoint.output_names))
            while (reply := self._answer(server, what, request, deadline, timeout_seconds))[0] == BUSY:
                if time.monotonic() + self._config.retry_delay_seconds > deadline:
                    why = f"was too busy for {timeout_seconds:g} s: {decode_error(reply[2])}"
                    raise ServerTimeout(f"{what}: {registration.describe()} {why}")
                self.pause(self._config.retry_delay_seconds)
        status, length, answer = reply
        if status in LOST:
            raise ServerUnreachable(f"{what}: {registration.describe()} answered: {decode_error(answer)}. See the server's log.")
        if status != 200:
            refused = RequestRefused if status == REFUSED else RequestRejected
            raise refused(f"{decode_error(answer)} ({registration.name} at {registration.url})")
        try:
            return decode_response(length, answer)
        except (ValueError, KeyError) as error:
            raise ServerUnreachable(f"{what}: {registration.describe()} sent an answer that cannot be read: {error}") from error

    def probe(self, server: Server) -> None:
        """Ask the server whether it is ready. Raises ServerUnreachable or ServerTimeout if it is not, or does not answer."""
        seconds = self._config.connect_timeout_seconds
        request = ("GET", "/v2/health/ready", {}, b"")
        status, _, answer = self._answer(server, "health", request, time.monotonic() + seconds, seconds)
        if status != 200:
            raise ServerUnreachable(f"{server.registration.describe()} is not ready: {answer[:2000].decode(errors='replace')}")

    def _answer(
        self, server: Server, what: str, request: tuple[str, str, dict[str, str], bytes], deadline: float, timeout_seconds: float
    ) -> tuple[int, str | None, bytes]:
        """Status, length of the JSON header, body."""
        registration = server.registration
        if self._closed.is_set():
            raise ServerUnreachable(f"{what}: not sent to {registration.describe()}: this client was closed")
        method, path, headers, body = request
        connection = self._access.connection(registration.url, self._config.connect_timeout_seconds)
        try:
            connection.request(method, path, body=body, headers={**headers, **self._access.headers()})
            if not self._is_answered(connection.sock, deadline, server.liveness):
                raise ServerTimeout(
                    f"{what}: {registration.describe()} did not answer within {timeout_seconds:g} s; it may still be working on it"
                )
            response = connection.getresponse()
            answer = response.status, response.getheader(HEADER_LENGTH), response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(server, what, error) from error
        finally:
            connection.close()
        self._answered_at = time.time()
        return answer

    def _is_answered(self, sock: socket.socket, deadline: float, liveness: Liveness) -> bool:
        """Whether bytes (or the end of the connection) arrive in time."""
        while not _readable(sock, POLL_SECONDS):
            if self._closed.is_set():
                raise ConnectionAbortedError("this client was closed")
            if liveness.problem() is not None:
                if _readable(sock, 1.0):  # an answer that was on its way while the server ended
                    return True
                raise ConnectionAbortedError("gave up waiting for its answer")
            if time.monotonic() > deadline:
                return False
        return True

    def _unreachable(self, server: Server, what: str, error: Exception) -> ServerUnreachable:
        """Names the server, its place, since when it is silent, and the state of its registration."""
        since = "never answered this client"
        if self._answered_at is not None:
            since = f"has not answered since {time.strftime('%H:%M:%S', time.localtime(self._answered_at))}"
        reason = server.liveness.problem(pause_seconds=0.0) or "its registration is alive"
        return ServerUnreachable(
            f"{what}: {server.registration.describe()} {since}: {type(error).__name__}: {error}; {reason}. See the server's log."
        )


def _readable(sock: socket.socket, timeout_seconds: float) -> bool:
    poll = select.poll()  # unlike select.select it takes descriptors above 1024
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


RETRIED = (Reason.behind.value, Reason.gap.value)  # of a server that was replaced by one with an older past


class Patience:
    """Time allowed for a replacement server to appear; `renew` it after progress."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """After progress: the time counts from now."""
        self._ends_at = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._ends_at - time.monotonic())


class Recovery:
    """One client's calls over the servers that come and go behind one name. Thread-safe.

    `fit(server, patience)` is called with every new server, before any other request: it brings the server to where the
    client is, or raises. If the server dies meanwhile, it begins again with the next one.
    """

    def __init__(self, link: ServiceLink, config: ClientConfig, fit: Callable[[Server, Patience], None]) -> None:
        self._link = link
        self._config = config
        self._fit = fit
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._given_up: ServerError | None = None

    def connect(self) -> Registration:
        """The first server; waits up to `server_client.discovery_timeout_seconds`. Raises ServerUnreachable, or what `fit` raises."""
        with self._lock:
            if self._server is None:
                self._server = self._replacement(Patience(self._config.discovery_timeout_seconds), "")
            return self._server.registration

    def reconnect(self) -> Registration:
        """The same, and `fit` is called again."""
        with self._lock:
            self._server = None
        return self.connect()

    def call(self, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        """One call, made again after each loss of a server.

        Raises ServerUnreachable or ServerTimeout if no server comes within `server_client.recovery_timeout_seconds`, or more than
        `server_client.max_lost_servers` are lost; RequestRejected with the server's error message.
        """
        lost = 0
        self.connect()
        while True:
            server = self._server
            try:
                return self._link.call(server, endpoint, inputs, timeout_seconds)
            except (ServerUnreachable, ServerTimeout, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.reason not in RETRIED:
                    raise
                lost += 1
                if lost > self._config.max_lost_servers:
                    raise
                self.recover(server, error)
                if self._server.registration.incarnation == server.registration.incarnation:
                    # It reports itself ready, but may not have noticed yet that its Triton has died.
                    self._link.pause(self._config.retry_delay_seconds * 2 ** (lost - 1))

    def recover(self, lost: Server, error: ServerError) -> None:
        """Put a server in the place of `lost`, unless another thread has done so."""
        with self._lock:
            if self._given_up is not None:
                raise self._given_up
            if self._server is not lost:
                return
            try:
                patience = Patience(self._config.recovery_timeout_seconds)
                self._server = self._replacement(patience, f"{error} ", lost.registration.incarnation)
            except ServerError as final:
                if not self._link.is_closed:
                    self._given_up = final
                raise

    def look(self) -> None:
        """Recover now if the server is known to be dead, even without a request. For a thread that checks from time to time."""
        server = self._server
        if server is not None and self._given_up is None:
            problem = server.liveness.problem()
            if problem is not None:
                self.recover(server, ServerUnreachable(f"{server.registration.describe()} was lost: {problem}."))

    def _replacement(self, patience: Patience, cause: str, lost: str = "") -> Server:
        """A server that is ready and fits: another one than the incarnation `lost`, or that one if it answers again."""
        incarnations: set[str] = set()
        while True:
            try:
                server = self._link.find(patience.left)
                if server.registration.incarnation not in {*incarnations, lost}:
                    patience.renew()
                    incarnations.add(server.registration.incarnation)
                self._fit(server, patience)
                return server
            except (ServerUnreachable, ServerTimeout) as error:
                if self._link.is_closed:
                    raise
                if not patience.left or self._link.is_gone or len(incarnations) > self._config.max_lost_servers:
                    if cause:
                        tried = f"{len(incarnations)} came and were lost" if incarnations else "none has taken its place"
                        waited = f"Waited for another server ({patience.seconds:g} s, server_client.recovery_timeout_seconds)"
                        cause += f"{waited}: {tried}: "
                    raise ServerUnreachable(f"{cause}{error}") from error
                self._link.pause(self._config.retry_delay_seconds)


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
