"""The address that a server listens on, and the name that others reach it by."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import psutil

from aligner.errors import ServerError
from aligner.servers.config import ServerConfig

EVERYWHERE = ("0.0.0.0", "::")
BACKLOG = 4096  # connections that wait to be accepted, if the kernel allows so many (net.core.somaxconn)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `port`, or on a free one for 0.

    Raises:
        ServerError: the port is taken, or `host` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}; free port {port} or set server.port to another one (0 picks a free one)"
        ) from error
    return listener


def advertised_host(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """The host that clients connect to: as configured, else the bound address, else (if every address is bound) this machine's own.

    That is an address rather than a name, so that clients need no resolver; with TLS it is a name, because certificates hold names. Slurm's
    name for the node comes first, then the machine's, then any interface that is up; loopback only if there is nothing else.
    """
    if config.advertised_host:
        return _bracketed(config.advertised_host)
    if config.host not in EVERYWHERE:
        return _bracketed(config.host)
    names = [name for name in (environ.get("SLURMD_NODENAME", ""), socket.gethostname()) if name]
    for name in names:
        for address in _resolved(name):
            if not address.startswith("127.") and _is_ours(address):
                return name if config.tls_certificate else address
    return names[0] if config.tls_certificate else next(_interface_addresses(), "127.0.0.1")


def _resolved(name: str) -> list[str]:
    try:
        return [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except socket.gaierror:
        return []  # a node may well be unknown to the resolver: its interfaces are asked then


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False  # stale name service data, or another machine's name
    return True


def _interface_addresses() -> Iterator[str]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family == socket.AF_INET and not address.address.startswith("127."):
                yield address.address


def _bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host
