"""Who may hold a connection to a gateway: the run's own requests always find a place, whatever anybody else opens.

A connection is a stranger's until a request with the run's secret has come over it. Strangers have few seats of their own, and little time:
SECONDS from the connection to a whole header with the secret, TLS included. If their seats are taken, the oldest of the address
that has most of them has to go. A client of the run sends its header at once, so it is a stranger for a moment only.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

STRANGERS = 256
SECONDS = 5.0
OTHER_FILES = 512  # that the process may have open besides connections
_AT_ONCE = 16  # connections taken before those that are there go on
_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0  # what goes wrong again and again is said once in so long
_BUSY_SECONDS = 0.1  # until the next try where the machine has no room for a connection


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
    """aiohttp's, which says when a connection has ended."""

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
        self._by_address: Counter[str] = Counter()

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
                if taken % _AT_ONCE == 0:  # `sock_accept` does not wait where a connection is there
                    await asyncio.sleep(0)
        finally:
            looking.cancel()

    def trust(self, handler: web.RequestHandler) -> bool:
        """A request with the secret has come over this connection; False if too many have such, or the connection has ended meanwhile."""
        if handler in self._trusted:
            return True
        if handler not in self._strangers or len(self._trusted) >= self._max_trusted:
            return False
        self._leave_strangers(handler)
        self._trusted.add(handler)
        return True

    def leave(self, handler: web.RequestHandler) -> None:
        """The connection has ended."""
        self._leave_strangers(handler)
        self._trusted.discard(handler)

    def _enter(self, handler: web.RequestHandler, connection: socket.socket, address: str) -> None:
        if len(self._strangers) >= STRANGERS:
            self._show_out()
        seat = self._strangers[handler] = _Seat(address, connection)
        self._by_address[address] += 1
        seat.task = asyncio.get_running_loop().create_task(self._open(handler, seat))
        seat.task.add_done_callback(seat.opened)

    async def _open(self, handler: web.RequestHandler, seat: _Seat) -> None:
        """Shake hands, if TLS is spoken, and leave the rest to the handler."""
        loop = asyncio.get_running_loop()
        settings = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": SECONDS}
        try:
            seat.transport, _ = await loop.connect_accepted_socket(lambda: handler, seat.connection, **settings)
        except (OSError, asyncio.CancelledError):  # it has no certificate, has gone, or had to
            seat.connection.close()
            self.leave(handler)

    def _leave_strangers(self, handler: web.RequestHandler) -> None:
        seat = self._strangers.pop(handler, None)
        if seat is not None:
            self._by_address[seat.address] -= 1
            if not self._by_address[seat.address]:
                del self._by_address[seat.address]

    def _show_out(self) -> None:
        """End the oldest stranger of the address that has most."""
        if not self._by_address:
            return
        address = max(self._by_address, key=self._by_address.__getitem__)
        handler, seat = next((handler, seat) for handler, seat in self._strangers.items() if seat.address == address)
        self._leave_strangers(handler)
        seat.clear()

    async def _show_out_the_late(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            latest = time.monotonic() - SECONDS
            for handler, seat in [pair for pair in self._strangers.items() if pair[1].since < latest]:
                self._leave_strangers(handler)
                seat.clear()


def allow_files(max_connections: int) -> str:
    """Raise this process's limit on open files, where that is needed; why the connections would not fit, empty if they do."""
    wanted = max_connections + STRANGERS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return (
            f"this process may open {hard} files (ulimit -Hn); {wanted} are needed: {max_connections} connections, {STRANGERS} of strangers"
        )
    with contextlib.suppress(ValueError):  # somebody has lowered the hard limit meanwhile
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ""
