"""Calls that survive the loss of their server: wait for another one of the same name, bring it up to date, and ask again.

Requests must be harmless to repeat: inference is; training is, because the server's ledger records the applied ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from aligner.errors import ServerError, ServerTimeout, ServerUnreachable
from aligner.servers.config import ClientConfig
from aligner.servers.ledger import Reason
from aligner.servers.link import RequestRefused, Server, ServiceLink
from aligner.servers.registry import Registration
from aligner.servers.wire import Endpoint

RETRIED = (Reason.behind.value, Reason.gap.value)  # of a server that was replaced by one with an older past


class Patience:
    """Time allowed for a replacement server to appear; `renew` it after progress."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Something good has happened: the time counts from now."""
        self._ends_at = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._ends_at - time.monotonic())


class Recovery:
    """One client's calls over the servers that come and go behind one name. Thread-safe.

    `fit(server, patience)` is called with every new server, before any other request: it brings the server to where the
    client is, or raises. It may be interrupted by the server's death, and begins again with the next one.
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

        Raises:
            ServerUnreachable: no other server came within `server_client.recovery_timeout_seconds`, or this call met the end of more than
                `server_client.max_lost_servers`.
            ServerTimeout: likewise, if the servers do not answer.
            RequestRejected: the server's error message.
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
                    # It says that it is well, and may not know better yet: Triton dies moments before its server notices.
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
                hopeless = self._link.is_gone or len(incarnations) > self._config.max_lost_servers
                if not patience.left or hopeless:
                    raise self._giving_up(cause, error, patience, len(incarnations)) from error
                self._link.pause(self._config.retry_delay_seconds)

    def _giving_up(self, cause: str, error: ServerError, patience: Patience, num_servers: int) -> ServerUnreachable:
        if not cause:
            return ServerUnreachable(str(error))
        tried = f"{num_servers} were met since and did not last" if num_servers else "none has taken its place"
        waited = f"Waited for another server ({patience.seconds:g} s, server_client.recovery_timeout_seconds)"
        return ServerUnreachable(f"{cause}{waited}: {tried}: {error}")
