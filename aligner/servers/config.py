"""Settings of the servers and of their clients. This module imports neither PyTriton nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.errors import ConfigError


def _positive(owner: str, **values: float) -> None:
    """Raise ConfigError for the first value that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{owner}.{name} is {value}; it must be greater than 0")


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """How one critic or reward server listens and how long it waits. Times are in seconds.

    The bundled Triton has known vulnerabilities and no authentication: bind it to loopback, or to an address that only the run's own
    nodes reach.
    """

    host: str = "127.0.0.1"  # the address that is bound
    port: int = 0  # 0 picks a free one; clients find it through the services directory
    advertised_host: str = ""  # what clients connect to; empty: `host`, or this machine's name where `host` is 0.0.0.0
    ready_timeout_seconds: float = 180.0  # from start to all endpoints ready
    heartbeat_seconds: float = 2.0  # the registration is touched this often
    idle_seconds: float = 1.0  # an idle server talks to its other ranks this often, far inside any process-group timeout
    control_timeout_seconds: float = 7200.0  # how far apart the ranks may finish one operation
    failure_grace_seconds: float = 5.0  # how long ranks that hang in a collective are given once another rank has failed
    shutdown_timeout_seconds: float = 2.0  # how long Triton may take to send its last answers; then its processes are killed

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("ServerConfig.host is empty; give an address of this machine, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ServerConfig.port is {self.port}; allowed are 1 to 65535, or 0 to pick a free one")
        _positive(
            "ServerConfig",
            ready_timeout_seconds=self.ready_timeout_seconds,
            heartbeat_seconds=self.heartbeat_seconds,
            idle_seconds=self.idle_seconds,
            control_timeout_seconds=self.control_timeout_seconds,
            failure_grace_seconds=self.failure_grace_seconds,
            shutdown_timeout_seconds=self.shutdown_timeout_seconds,
        )
        if self.idle_seconds > self.control_timeout_seconds / 4:
            raise ConfigError(
                f"ServerConfig.idle_seconds is {self.idle_seconds}; it must be at most a quarter of control_timeout_seconds "
                f"({self.control_timeout_seconds})"
            )


@dataclass(kw_only=True, slots=True)
class ClientConfig:
    """How a client finds its server and how long it waits. Times are in seconds."""

    discovery_timeout_seconds: float = 300.0  # until the service has registered itself as ready
    rediscovery_timeout_seconds: float = 10.0  # until another server of frozen weights has replaced one that was lost
    connect_timeout_seconds: float = 10.0  # one TCP connection, and each pause while bytes are being moved
    request_timeout_seconds: float = 600.0  # one inference request
    train_timeout_seconds: float = 7200.0  # one train or save request
    heartbeat_timeout_seconds: float = 20.0  # a registration that was not touched for so long belongs to a dead server
    num_threads: int = 4  # inference requests in flight
    rows_per_request: int = 64  # larger batches are sent in pieces of this many rows
    num_attempts: int = 3  # of an inference request whose connection fails; training is never repeated
    retry_delay_seconds: float = 0.5

    def __post_init__(self) -> None:
        _positive(
            "ClientConfig",
            discovery_timeout_seconds=self.discovery_timeout_seconds,
            rediscovery_timeout_seconds=self.rediscovery_timeout_seconds,
            connect_timeout_seconds=self.connect_timeout_seconds,
            request_timeout_seconds=self.request_timeout_seconds,
            train_timeout_seconds=self.train_timeout_seconds,
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
            num_threads=self.num_threads,
            rows_per_request=self.rows_per_request,
            num_attempts=self.num_attempts,
            retry_delay_seconds=self.retry_delay_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What a request may hold; checked on rank 0 before any rank computes."""

    vocab_size: int
    max_sequence_length: int
    max_rows: int = 65536
