"""One client's way to its server: discovery, one HTTP exchange at a time per thread, and the prompt news of the server's death.

Every exchange opens a connection of its own: that costs well under a millisecond, and a connection that died while idle can never be
mistaken for a server that died while training. While an answer is awaited, the registration is watched.
"""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from aligner.errors import RequestRejected, ServerTimeout, ServerUnreachable
from aligner.servers.config import ClientConfig
from aligner.servers.kserve import HEADER_LENGTH, decode_error, decode_response, encode_request
from aligner.servers.registry import POLL_SECONDS, Liveness, Registration, registration_path, wait_for_service
from aligner.servers.wire import Endpoint


class ServiceLink:
    """Thread-safe. A pinned link stays with the incarnation that it found first: a restarted critic may have other weights."""

    def __init__(self, services_dir: Path, name: str, config: ClientConfig, *, pinned: bool) -> None:
        self._services_dir = services_dir
        self._name = name
        self._config = config
        self._pinned = pinned
        self._lock = threading.Lock()
        self._found: tuple[Registration, Liveness] | None = None
        self._answered_at: float | None = None
        self._closed = threading.Event()

    def wait_until_ready(self) -> Registration:
        """The server's registration; the first call looks for it for `discovery_timeout_seconds`. Raises ServerUnreachable."""
        return self._server()[0]

    def close(self) -> None:
        """Calls that are under way end with ServerUnreachable within a fraction of a second."""
        self._closed.set()

    def call_once(self, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        """One exchange, never repeated.

        Raises:
            ServerUnreachable: no server, a dead one, or a broken connection; whether the operation ran is then unknown.
            ServerTimeout: no answer in time.
            RequestRejected: the server's error message.
        """
        return self._call(self._server(), endpoint, inputs, timeout_seconds)

    def call_repeatedly(self, endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float) -> dict[str, np.ndarray]:
        """The same, tried `num_attempts` times where the connection fails. Only for calls without effects."""
        for attempt in range(1, self._config.num_attempts):
            server = self._server()
            try:
                return self._call(server, endpoint, inputs, timeout_seconds)
            except ServerUnreachable:
                if self._closed.is_set() or (self._pinned and server[1].check_now() is not None):
                    raise
                self._closed.wait(self._config.retry_delay_seconds * attempt)
        return self.call_once(endpoint, inputs, timeout_seconds)

    def _call(
        self, server: tuple[Registration, Liveness], endpoint: Endpoint, inputs: Mapping[str, np.ndarray], timeout_seconds: float
    ) -> dict[str, np.ndarray]:
        registration, liveness = server
        if self._closed.is_set():
            raise ServerUnreachable(f"{endpoint.name}: not sent to {registration.describe()}: this client was closed")
        request = encode_request(inputs, endpoint.output_names)
        deadline = time.monotonic() + timeout_seconds
        try:
            status, length, answer = self._exchange(server, endpoint, request, deadline)
        except _Expired as error:
            raise ServerTimeout(
                f"{endpoint.name}: {registration.describe()} did not answer within {timeout_seconds:g} s; it may still be working on it"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(registration, liveness, endpoint, error) from error
        self._answered_at = time.time()
        if status != 200:
            raise RequestRejected(f"{decode_error(answer)} ({registration.name} at {registration.url})")
        try:
            return decode_response(length, answer)
        except (ValueError, KeyError) as error:
            raise RequestRejected(f"{endpoint.name}: {registration.describe()} sent an answer that cannot be read: {error}") from error

    def _server(self) -> tuple[Registration, Liveness]:
        with self._lock:
            if self._found is not None and not self._pinned and self._found[1].problem() is not None:
                self._found = None  # a restarted server of frozen weights is as good as the first
            if self._found is None:
                config = self._config
                known = self._answered_at is not None
                registration = wait_for_service(
                    self._services_dir,
                    self._name,
                    timeout_seconds=config.rediscovery_timeout_seconds if known else config.discovery_timeout_seconds,
                    heartbeat_timeout_seconds=self._config.heartbeat_timeout_seconds,
                    abandoned=self._closed,
                )
                path = registration_path(self._services_dir, self._name)
                self._found = registration, Liveness(path, registration, self._config.heartbeat_timeout_seconds)
            return self._found

    def _exchange(
        self, server: tuple[Registration, Liveness], endpoint: Endpoint, request: tuple[dict[str, str], bytes], deadline: float
    ) -> tuple[int, str | None, bytes]:
        """Status, length of the JSON header, body."""
        registration, liveness = server
        headers, body = request
        address = urlsplit(registration.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=self._config.connect_timeout_seconds)
        try:
            connection.request("POST", f"/v2/models/{endpoint.name}/infer", body=body, headers=headers)
            self._await_answer(connection.sock, deadline, liveness)
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

    def _unreachable(self, registration: Registration, liveness: Liveness, endpoint: Endpoint, error: Exception) -> ServerUnreachable:
        """Says which server, where, since when, and what its registration tells."""
        since = "never answered this client" if self._answered_at is None else f"has not answered since {_clock(self._answered_at)}"
        reason = liveness.check_now() or "its registration is alive"
        return ServerUnreachable(
            f"{endpoint.name}: {registration.describe()} {since}: {type(error).__name__}: {error}; {reason}. See the server's log."
        )


def _readable(sock: socket.socket, timeout_seconds: float) -> bool:
    poll = select.poll()  # unlike select.select it takes descriptors above 1024
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


class _Expired(Exception):
    """The deadline has passed."""


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
