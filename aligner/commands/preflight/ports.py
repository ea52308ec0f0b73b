"""Can the servers listen where the config says, and do the other nodes reach them there?"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.cluster.run_directory import RunDirectory
from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.errors import ServerError
from aligner.run.settings import JobRun
from aligner.servers.access import Access, advertised_host, listen
from aligner.servers.config import ServerConfig

CONNECT_SECONDS = 5.0
_LOOPBACK = ("127.", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """One node's server addresses, and the servers it could not reach, with the reason."""

    addresses: dict[str, str] = field(default_factory=dict)  # server -> host:port
    unreachable: dict[str, str] = field(default_factory=dict)  # server -> why


def servers(config: JobRun) -> dict[str, ServerConfig]:
    """The servers that a run of this config has."""
    return {server.name: server.settings for server in config.servers()}


def _observe(context: Context) -> Reached:
    config, allocation = context.config, context.allocation
    wanted = servers(config)
    if not wanted:
        return Reached()
    listen("127.0.0.1", 0).close()  # PyTriton listens there
    _check_certificates(config, wanted)
    listeners = {}
    try:
        for name, server in wanted.items():
            try:
                listeners[name] = listen(server.host, server.port)
            except ServerError as error:
                raise ServerError(f"{name}: {error}") from error
        addresses = {name: f"{advertised_host(wanted[name], os.environ)}:{it.getsockname()[1]}" for name, it in listeners.items()}
        return Reached(addresses=addresses, unreachable=_reach_neighbour(context, addresses))
    finally:
        # Only when all have tried.
        allocation.put(f"tried/{allocation.rank}", True)
        for rank in allocation.leaders():
            allocation.get(
                f"tried/{rank}", deadline=allocation.deadline, what=f"rank {rank} on {allocation.node_of(rank)} to try the ports"
            )
        for listener in listeners.values():
            listener.close()


def _check_certificates(config: JobRun, wanted: Mapping[str, ServerConfig]) -> None:
    """Raise ConfigError if a certificate or the run's secret is unusable."""
    directory = RunDirectory(Path(config.run.directory))
    for name, server in wanted.items():
        Access.for_server(directory.secret, server, name=name, own_tls=config.run.server_tls)
    if wanted:
        Access.for_client(directory.secret, config.server_client, own_tls=config.run.server_tls)


def _reach_neighbour(context: Context, own: Mapping[str, str]) -> dict[str, str]:
    """Connect to the servers of the next node; failures by server."""
    allocation = context.allocation
    leaders = allocation.leaders()
    allocation.put(f"addresses/{allocation.rank}", dict(own))
    other = leaders[(leaders.index(allocation.rank) + 1) % len(leaders)]
    addresses = allocation.get(
        f"addresses/{other}", deadline=allocation.deadline, what=f"rank {other} on {allocation.node_of(other)} to listen"
    )
    failed = {}
    for name, address in addresses.items():
        if address.startswith(_LOOPBACK) and (other != allocation.rank or _has_other_components()):
            failed[name] = f"{allocation.node_of(other)} would be called {address}, which is every node's own"
            continue
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            failed[name] = f"{address} ({allocation.node_of(other)}) cannot be reached: {error}"
    return failed


def _has_other_components() -> bool:
    """In a heterogeneous Slurm job the servers run on nodes of their own."""
    return os.environ.get("SLURM_HET_SIZE", "1") not in ("0", "1")


def judge(context: Context, seen: Mapping[int, Reached]) -> Finding:
    """Fatal if a server is unreachable from another node, or two with the same fixed port could share one."""
    wanted = servers(context.config)
    if not wanted:
        return Finding(level=Level.ok, found="this run has no servers")
    if clash := _same_port(wanted):
        text = f"{' and '.join(clash)} have the same port {wanted[clash[0]].port}: on one node only one of them can listen"
        level = Level.warning if len(seen) > 1 else Level.fatal
        return Finding(level=level, found=text, advice="give each its own, or 0 (clients find it through the run directory)")
    problems: dict[str, list[int]] = {}
    for rank, reached in seen.items():
        for name, why in reached.unreachable.items():
            problems.setdefault(f"{name}: {why}", []).append(rank)
    if problems:
        text = "; ".join(f"{who(context.allocation, ranks)}: {why}" for why, ranks in list(problems.items())[:4])
        names = " and ".join(f"{name}.server.host" for name in wanted)
        advice = f"set {names} to 0.0.0.0 or to the cluster's interface; if it is set, let these nodes reach each other's ports"
        return Finding(level=Level.fatal, found=text, advice=advice)
    described = ", ".join(f"{name} on {_described(server, seen, context.config.run.server_tls)}" for name, server in wanted.items())
    return Finding(level=Level.ok, found=described)


def _described(server: ServerConfig, seen: Mapping[int, Any], own_tls: bool) -> str:
    port = f"port {server.port}" if server.port else "a free port"
    reach = f", reached from the other {'node' if len(seen) == 2 else 'nodes'}" if len(seen) > 1 else ""
    return f"{server.host}, {port}{' with TLS' if own_tls or server.tls_certificate else ''}{reach}"


def _same_port(wanted: Mapping[str, ServerConfig]) -> Sequence[str]:
    for server in wanted.values():
        same = [name for name, its in wanted.items() if its.port == server.port and server.port]
        if len(same) > 1:
            return same
    return ()


PORTS = Item(
    "ports",
    Where.every_node,
    _observe,
    judge,
    timeout_seconds=60.0,
    needs=("filesystem",),
    advice="port 0 picks a free one; host 0.0.0.0 is every address of the server's node",
)
