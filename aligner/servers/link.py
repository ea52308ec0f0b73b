"""One client's way to its server: discovery, one HTTP exchange at a time per thread, and the prompt news of the server's death.

Every exchange opens a new connection: that costs well under a millisecond, and a connection that died while idle can never be
mistaken for a server that died while training. While an answer is awaited, the registration is watched.
"""

from __future__ import annotations

import http.client
import re
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aligner.errors import RequestRejected, ServerTimeout, ServerUnreachable
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig
from aligner.servers.kserve import HEADER_LENGTH, decode_error, decode_response, encode_request
from aligner.servers.registry import POLL_SECONDS, Liveness, Registration, gone_path, registration_path, wait_for_service
from aligner.servers.wire import Endpoint
from aligner.telemetry import recording

BUSY, REFUSED = 429, 409
LOST = (408, 500, 502, 503)  # the server ends, or what it stands before has; whether the operation ran is unknown


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
    """Thread-safe. Finds servers of one name, belonging to the attempt `attempt` of the run ("": to any).

    One that `is_talkative` prints what it waits for: one client of many should.
    """

    def __init__(
        self, services_dir: Path, name: str, config: ClientConfig, *, access: Access, attempt: str = "", is_talkative: bool = False
    ) -> None:
        self._services_dir = services_dir
        self._name = name
        self._config = config
        self._access = access
        self._attempt = attempt
        self._is_talkative = is_talkative
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
        """Whether a launcher says that nobody will start this server again."""
        return gone_path(self._services_dir, self._name).exists()

    def close(self) -> None:
        """Calls that are under way end with ServerUnreachable within a fraction of a second."""
        self._closed.set()

    def pause(self, seconds: float) -> None:
        """Sleep, at most until this client is closed."""
        self._closed.wait(seconds)

    def call(self, server: Server, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        """One exchange. A server that is too busy to take the request is asked again.

        Raises:
            ServerUnreachable: a dead server, one that is ending, a broken connection; whether the operation ran is then unknown.
            ServerTimeout: no answer in time.
            RequestRefused: the request does not fit to what the server was trained on.
            RequestRejected: the server's error message.
        """
        with recording.span(endpoint.name, recording.rank_lane(f"calls to {self._name}")):
            return self._call(server, endpoint, inputs, timeout_seconds)

    def _call(self, server: Server, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        registration, what = server.registration, endpoint.name
        request = encode_request(inputs, endpoint.output_names)
        deadline = time.monotonic() + timeout_seconds
        while True:
            status, length, answer = self._answer(server, what, ("POST", f"/v2/models/{what}/infer", *request), deadline, timeout_seconds)
            if status != BUSY:
                break
            if time.monotonic() + self._config.retry_delay_seconds > deadline:
                raise ServerTimeout(f"{what}: {registration.describe()} was too busy for {timeout_seconds:g} s: {decode_error(answer)}")
            self.pause(self._config.retry_delay_seconds)
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
        """Ask the server whether it is ready. Raises ServerUnreachable or ServerTimeout if it is not, or does not say."""
        seconds = self._config.connect_timeout_seconds
        request = ("GET", "/v2/health/ready", {}, b"")
        status, _, answer = self._answer(server, "health", request, time.monotonic() + seconds, seconds)
        if status != 200:
            raise ServerUnreachable(f"{server.registration.describe()} is not ready: {answer[:2000].decode(errors='replace')}")

    def _tell(self, text: str) -> None:
        if self._is_talkative:
            print(text, flush=True)

    def _answer(
        self, server: Server, what: str, request: tuple[str, str, dict[str, str], bytes], deadline: float, timeout_seconds: float
    ) -> tuple[int, str | None, bytes]:
        """Status, length of the JSON header, body."""
        registration = server.registration
        if self._closed.is_set():
            raise ServerUnreachable(f"{what}: not sent to {registration.describe()}: this client was closed")
        try:
            answer = self._exchange(server, request, deadline)
        except _Expired as error:
            raise ServerTimeout(
                f"{what}: {registration.describe()} did not answer within {timeout_seconds:g} s; it may still be working on it"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(server, what, error) from error
        self._answered_at = time.time()
        return answer

    def _exchange(self, server: Server, request: tuple[str, str, dict[str, str], bytes], deadline: float) -> tuple[int, str | None, bytes]:
        method, path, headers, body = request
        connection = self._access.connection(server.registration.url, self._config.connect_timeout_seconds)
        try:
            connection.request(method, path, body=body, headers={**headers, **self._access.headers()})
            self._await_answer(connection.sock, deadline, server.liveness)
            response = connection.getresponse()
            return response.status, response.getheader(HEADER_LENGTH), response.read()
        finally:
            connection.close()

    def _await_answer(self, sock: socket.socket, deadline: float, liveness: Liveness) -> None:
        """Return when bytes (or the end of the connection) have arrived."""
        while not _readable(sock, POLL_SECONDS):
            if self._closed.is_set():
                raise ConnectionAbortedError("this client was closed")
            problem = liveness.problem()
            if problem is not None:
                if _readable(sock, 1.0):  # an answer that was on its way while the server ended
                    return
                raise ConnectionAbortedError("gave up waiting for its answer")
            if time.monotonic() > deadline:
                raise _Expired

    def _unreachable(self, server: Server, what: str, error: Exception) -> ServerUnreachable:
        """Says which server, where, since when, and what its registration tells."""
        since = "never answered this client" if self._answered_at is None else f"has not answered since {_clock(self._answered_at)}"
        reason = server.liveness.check_now() or "its registration is alive"
        return ServerUnreachable(
            f"{what}: {server.registration.describe()} {since}: {type(error).__name__}: {error}; {reason}. See the server's log."
        )


def _readable(sock: socket.socket, timeout_seconds: float) -> bool:
    poll = select.poll()  # unlike select.select it takes descriptors above 1024
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


class _Expired(Exception):
    """The deadline has passed."""


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
