"""Settings of the servers and of their clients. This module imports neither PyTriton nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec

from aligner.errors import ABOVE_0, ConfigError, check_range


def _check_above_0(config: ServerConfig | ClientConfig, *, but: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first number that is not above zero, except those that other rules are for."""
    check_range(config, "", ABOVE_0, *(one.name for one in fields(config) if not isinstance(one.default, str) and one.name not in but))


class Transport(str, Enum):
    """How requests get from a server's gateway to its ranks."""

    auto = "auto"  # pytriton if nvidia-pytriton is installed, else http
    pytriton = "pytriton"  # through the Triton server that PyTriton ships; requires numpy 1
    http = "http"  # straight, in the gateway's process; requires nothing else


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """How one critic or reward server listens, how long it waits and how much it accepts. Times are in seconds.

    The gateway listens, and admits only requests with the run's secret; PyTriton itself listens on a Unix socket of this user.
    """

    transport: Transport = Transport.auto  # behind the gateway, the same to clients; auto: pytriton if it is installed, else http
    host: str = "127.0.0.1"  # the address that is bound; 0.0.0.0: every one of this machine, for clients on other nodes
    port: int = 0  # 0 picks a free one; clients find it through the services directory
    advertised_host: str = ""  # what clients connect to; empty: `host`, or this machine's own address if `host` is 0.0.0.0
    ready_timeout_seconds: float = 180.0  # from start to all endpoints ready
    heartbeat_seconds: float = 2.0  # the registration is touched this often
    idle_seconds: float = 1.0  # an idle server talks to its other ranks this often, far inside any process-group timeout
    control_timeout_seconds: float = 7200.0  # how far apart the ranks may finish one operation
    failure_grace_seconds: float = 5.0  # how long ranks that hang in a collective are given once another rank has failed
    idle_timeout_seconds: float = 3600.0  # a server that no launcher started ends after this long without a request and without an actor
    shutdown_timeout_seconds: float = 10.0  # how long Triton may take to unload its models (2 to 4 s); then its processes are killed
    max_connections: int = 1024  # of clients that have shown the secret; others get a few more, for seconds
    max_requests: int = 256  # accepted and not yet answered; further ones are refused with 429 (try again)
    max_request_bytes: int = 1 << 30  # of one request's body; an endpoint whose largest request is smaller allows no more than that
    max_pending_bytes: int = 4 << 30  # of all bodies that are held at once
    body_timeout_seconds: float = 60.0  # from a request's header to the last byte of its body
    round_limit_seconds: float = 15.0  # an idle server that has not heard from all ranks for longer is not ready
    operation_limit_seconds: float = 7200.0  # a server whose operation runs longer is not ready
    stuck_limit_seconds: float = 120.0  # a server ends after this long with waiting requests of which none reaches its ranks
    tls_certificate: str = ""  # PEM file with the server's certificate chain; empty: plain HTTP
    tls_key: str = ""  # PEM file with its key, without a password

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host='': give an address of this machine, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: must be from 1 to 65535, or 0 to pick a free one")
        _check_above_0(self, but=("port", "round_limit_seconds", "stuck_limit_seconds", "max_pending_bytes"))
        if self.stuck_limit_seconds < self.round_limit_seconds:
            raise ConfigError(
                f"stuck_limit_seconds={self.stuck_limit_seconds}: must be at least round_limit_seconds={self.round_limit_seconds}"
            )
        if self.round_limit_seconds < 2 * self.idle_seconds:
            raise ConfigError(f"round_limit_seconds={self.round_limit_seconds}: must be at least twice idle_seconds={self.idle_seconds}")
        if self.max_pending_bytes < self.max_request_bytes:
            raise ConfigError(
                f"max_pending_bytes={self.max_pending_bytes}: must hold one request of max_request_bytes={self.max_request_bytes}"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError(f"tls_certificate={self.tls_certificate!r}, tls_key={self.tls_key!r}: give both for TLS, or none")
        if self.idle_seconds > self.control_timeout_seconds / 4:
            raise ConfigError(
                f"idle_seconds={self.idle_seconds}: must be at most a quarter of control_timeout_seconds={self.control_timeout_seconds}"
            )

    def chosen_transport(self) -> Transport:
        """pytriton or http. Raises ConfigError if PyTriton is asked for and is not installed in this environment."""
        is_installed = find_spec("pytriton") is not None
        if self.transport is Transport.auto:
            return Transport.pytriton if is_installed else Transport.http
        if self.transport is Transport.pytriton and not is_installed:
            raise ConfigError(
                "server.transport=pytriton: nvidia-pytriton is not installed in this environment: pip install 'aligner[servers]' (numpy 1, "
                "Python up to 3.12), or set server.transport=http"
            )
        return self.transport


@dataclass(kw_only=True, slots=True)
class ClientConfig:
    """How a client finds its server and how long it waits. Times are in seconds."""

    discovery_timeout_seconds: float = 300.0  # until the service has registered itself as ready
    recovery_timeout_seconds: float = 600.0  # until another server has taken the place of one that was lost; then the run ends
    connect_timeout_seconds: float = 10.0  # one TCP connection, and each pause while bytes are being moved
    request_timeout_seconds: float = 600.0  # one inference request
    train_timeout_seconds: float = 7200.0  # one train or save request
    heartbeat_timeout_seconds: float = 20.0  # a registration that was not touched for longer belongs to a dead server
    num_threads: int = 4  # inference requests in flight
    rows_per_request: int = 64  # larger batches are sent in pieces of this many rows
    max_lost_servers: int = 5  # servers that one request may lose before it fails: it may be what kills them
    retry_delay_seconds: float = 0.5  # pause before a request is tried again
    tls_ca: str = ""  # PEM file with the certificate, or its authority's, of servers that speak TLS; empty: plain HTTP

    def __post_init__(self) -> None:
        _check_above_0(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Limits of a request; checked on rank 0 before any rank computes."""

    vocab_size: int
    max_sequence_length: int
    max_rows: int = 65536
    max_text_bytes: int = 1 << 20  # of one text, as UTF-8
