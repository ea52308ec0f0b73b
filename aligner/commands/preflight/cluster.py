"""The nodes as a cluster: clocks, network, the shared run directory, and the servers' ports."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from aligner.cluster.run_directory import RunDirectory
from aligner.commands.preflight.allocation import Allocation
from aligner.commands.preflight.framework import Context, Finding, Where, fatal, item, ok, warning, who
from aligner.errors import LaunchError, ServerError
from aligner.parallel import links, platform
from aligner.parallel.links import Link, Span
from aligner.planner.config import ClusterConfig, Device
from aligner.servers.access import Access, advertised_host, listen

CLOCK_ROUNDS = 3
NOTABLE_SECONDS, TOO_FAR_SECONDS = 1.0, 60.0  # of difference between clocks
_PAUSE_SECONDS = 0.05  # lets the other nodes wait when rank 0 calls
SLOW = 0.5  # part of its class's median below which a link is slow
POOR = 0.25  # part of the cluster file's rate below which a class of links is slow
_GROUP_TIMEOUT = timedelta(hours=1)  # far beyond every item's: the preflight's own deadlines have better messages
LATE_SECONDS = 2.0  # within which a node should see another node's new file: heartbeats and registrations are such files
SAMPLE_BYTES = 16 << 20
_POLL_SECONDS = 0.01
_CLEAN_SECONDS = 5.0
CONNECT_SECONDS = 5.0
_LOOPBACK = ("127.", "localhost", "[::1]")


def _wait_for(allocation: Allocation, key: str, rank: int, to: str) -> Any:
    """What another rank leaves under `key/<rank>` once it has done what `to` says."""
    what = f"rank {rank} on {allocation.node_of(rank)} to {to}"
    return allocation.get(f"{key}/{rank}", deadline=allocation.deadline, what=what)


def _next_node(allocation: Allocation) -> int:
    leaders = allocation.leaders()
    return leaders[(leaders.index(allocation.rank) + 1) % len(leaders)]


@item("clock", Where.every_node, seconds=60.0, needs=("ranks",))
def clock(context: Context) -> float:
    """This node's clock minus rank 0's, plus the shortest duration of a call."""
    allocation, offsets = context.allocation, []
    for number in range(CLOCK_ROUNDS):
        allocation.put(f"ready/{number}/{allocation.rank}", True)
        if allocation.rank != 0:
            called = allocation.get(f"call/{number}", deadline=allocation.deadline, what="the time of rank 0", longest_pause=0.001)
            offsets.append(time.time() - float(called))
            continue
        for rank in allocation.leaders():
            _wait_for(allocation, f"ready/{number}", rank, "listen")
        time.sleep(_PAUSE_SECONDS)
        allocation.put(f"call/{number}", time.time())
        offsets.append(0.0)
    return min(offsets)


@clock.judged
def judge_clock(context: Context, seen: Mapping[int, float]) -> Finding:
    """Warning from one second of difference, fatal from one minute: certificates, munge credentials and heartbeats rely on clocks."""
    rank, offset = max(seen.items(), key=lambda pair: abs(pair[1]))
    figures, size = {"largest_offset_seconds": offset}, abs(offset)
    if len(seen) == 1:
        return ok("one node", figures=figures)
    if size < NOTABLE_SECONDS:
        return ok(f"within {max(size, 0.001):.3f} s of each other", figures=figures)
    nodes = context.allocation.node_of
    text = f"{nodes(rank)} is {size:.3g} s {'ahead of' if offset > 0 else 'behind'} {nodes(0)}"
    return (fatal if size >= TOO_FAR_SECONDS else warning)(text, "set the clocks by NTP (chronyc tracking on that node)", figures)


def ensure_group(context: Context) -> None:
    """The process group for items with collectives; the first one makes it. Every rank calls it."""
    if dist.is_initialized():
        return
    world, shared = context.allocation.world, context.config.run.ranks_per_gpu
    platform.select_device(world.local_rank, ranks_per_gpu=shared)
    dist.init_process_group(
        platform.backend(shared),
        store=dist.PrefixStore("preflight_group", context.allocation.store.clone()),  # a connection of its own: its waits are long
        rank=world.rank,
        world_size=world.world_size,
        timeout=_GROUP_TIMEOUT,
    )


@item(
    "network",
    Where.every_rank,
    seconds=180.0,
    needs=("versions", "config", "devices"),
    advice="NCCL_DEBUG=INFO, and the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); or exclude those nodes: --exclude",
)
def network(context: Context) -> list[dict[str, Any]]:
    """The links that this rank reports, as JSON."""
    ensure_group(context)
    return [asdict(link) for link in links.measure(context.allocation.nodes)]


@network.judged
def judge_network(context: Context, seen: Mapping[int, list[dict[str, Any]]]) -> Finding:
    """Warning if a link has less than half of its class's median, or (on GPUs) a class a quarter of the cluster file's rate."""
    found = [Link(**raw | {"span": Span(raw["span"]), "nodes": tuple(raw["nodes"])}) for links in seen.values() for raw in links]
    if not found:
        return ok("one rank: nothing to measure")
    lines, figures, slow = [f"{platform.backend()} all-reduce, bus bandwidth"], {}, []
    for span in Span:
        of_span = [link for link in found if link.span is span]
        if not of_span:
            continue
        lines.append(describe(span, of_span))
        key, slowest = span.value.replace(" ", "_"), min(of_span, key=lambda link: link.rate)
        figures |= {f"{key}_gb_per_second": slowest.rate / 1e9, f"{key}_microseconds": max(link.latency_seconds for link in of_span) * 1e6}
        typical = median(link.rate for link in of_span)
        slow += [f"{link.name}: {link.rate / typical:.0%} of the median" for link in of_span if link.rate < SLOW * typical]
        slow += _against_plan(span, typical, context.config.cluster)
    if not slow:
        return ok("\n".join(lines), figures=figures)
    advice = "compare that node's or GPU's link with the others (nvidia-smi topo -m, ibstat, NCCL_DEBUG=INFO), or exclude it: --exclude"
    return warning("\n".join([*lines, "slow: " + "; ".join(slow[:4])]), advice, figures)


def describe(span: Span, of_span: Sequence[Link]) -> str:
    """One class in a line, its slowest link named."""
    slowest = min(of_span, key=lambda link: link.rate)
    latency = max(link.latency_seconds for link in of_span) * 1e6
    count = f"{len(of_span)} measured, slowest " if len(of_span) > 1 else ""
    return f"{span.value}: {slowest.rate / 1e9:.2f} GB/s, {latency:.0f} us ({count}{slowest.name})"


def _against_plan(span: Span, typical: float, cluster: ClusterConfig) -> list[str]:
    if cluster.device != Device.gpu or span is Span.all_ranks:
        return []
    name = "nvlink_gb_per_second" if span is Span.within_node else "network_gb_per_second"
    planned = cluster.nvlink_gb_per_second if span is Span.within_node else cluster.network_gb_per_second
    if typical >= POOR * planned * 1e9:
        return []
    return [f"{span.value} {typical / 1e9:.1f} GB/s, and cluster.{name}={planned:g}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """One node's view of the run directory."""

    seen_after_seconds: float  # from another node's rename to the file's being visible here
    write_seconds: float  # small file: write, fsync, rename
    rate: float  # bytes per second of one large file with fsync, all nodes at once
    locks_hold: bool  # a lock that another node holds is refused here


@item(
    "filesystem",
    Where.every_node,
    seconds=90.0,
    needs=("config",),
    advice="give a run.directory on a file system that all nodes mount and that is yours",
)
def filesystem(context: Context) -> Files:
    allocation, leaders = context.allocation, context.allocation.leaders()
    if allocation.rank == 0:
        allocation.put("folder", str(_trial_folder(context)))
    folder = Path(str(allocation.get("folder", deadline=allocation.deadline, what="rank 0 to make the run directory")))
    try:
        return _try_out(context, folder, leaders)
    finally:
        allocation.put(f"finished/{allocation.rank}", True)
        if allocation.rank == 0:
            _clean(context, folder, leaders)


def _trial_folder(context: Context) -> Path:
    """A new folder inside the run directory. Raises LaunchError if it cannot be made."""
    run = RunDirectory(Path(context.config.run.directory))
    try:
        folder = run.create().path / f".preflight.{secrets.token_hex(4)}"
        folder.mkdir()
    except OSError as error:
        raise LaunchError(f"run.directory={run.path}: {error}") from error
    return folder


def _try_out(context: Context, folder: Path, leaders: list[int]) -> Files:
    allocation = context.allocation
    run = Path(context.config.run.directory).expanduser().absolute()
    if not run.is_dir() or not _appears(folder, allocation.deadline):
        raise LaunchError(f"{folder} is missing, although rank 0 on {allocation.node_of(0)} made it: {run} is not shared")
    if allocation.rank == 0:
        holder = (folder / "lock").open("w")
        fcntl.lockf(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    own = folder / f"of_{allocation.rank}"
    _, write_seconds = _written(own, [b"damaged"]), _written(own, [str(allocation.rank).encode()])  # the second one replaces a file
    allocation.put(f"written/{allocation.rank}", True)
    other = _next_node(allocation)
    _wait_for(allocation, "written", other, "write")
    started = time.monotonic()
    if not _appears(folder / f"of_{other}", allocation.deadline):
        raise LaunchError(
            f"the file that rank {other} on {allocation.node_of(other)} wrote to {folder} is not seen here: not the same file system"
        )
    seen_after = time.monotonic() - started
    text = (folder / f"of_{other}").read_text()
    if text != str(other):
        raise LaunchError(f"the file of rank {other} in {folder} reads {text!r}: a rename is not atomic here")
    try:
        os.link(own, folder / f"link_{allocation.rank}")
    except OSError as error:
        raise LaunchError(f"{folder}: a hard link cannot be made ({error}); a run needs a file system with hard links") from error
    locks_hold = True
    if allocation.rank != 0:
        _wait_for(allocation, "written", 0, "lock a file")
        locks_hold = _is_locked(folder / "lock", allocation.deadline)
    allocation.put(f"tried/{allocation.rank}", True)
    for rank in leaders:
        _wait_for(allocation, "tried", rank, "try the files")
    if allocation.rank == 0:
        holder.close()
    rate = SAMPLE_BYTES / _written(folder / f"large_{allocation.rank}", [os.urandom(1 << 20)] * (SAMPLE_BYTES >> 20))
    return Files(seen_after_seconds=seen_after, write_seconds=write_seconds, rate=rate, locks_hold=locks_hold)


def _appears(path: Path, deadline: float) -> bool:
    """Whether the path becomes visible in time. Lists its folder, which refreshes the caches of network file systems."""
    while not (path.exists() or path.name in os.listdir(path.parent)):
        if time.monotonic() > deadline - 1.0:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _written(path: Path, pieces: Sequence[bytes]) -> float:
    """Seconds to write a file and give it its name, as the registry and the checkpoints do."""
    started, temporary = time.monotonic(), path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return time.monotonic() - started


def _is_locked(path: Path, deadline: float) -> bool:
    if not _appears(path, deadline):
        return False
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _clean(context: Context, folder: Path, leaders: list[int]) -> None:
    allocation, deadline = context.allocation, time.monotonic() + _CLEAN_SECONDS
    with suppress(LaunchError):  # it is dead or hangs, as its missing answer shows; files that it has open there may stay behind
        for rank in leaders:
            allocation.get(f"finished/{rank}", deadline=deadline, what=f"rank {rank} to leave {folder}", heeds_failure=False)
    shutil.rmtree(folder, ignore_errors=True)  # a network file system may still show a removed name


@filesystem.judged
def judge_filesystem(context: Context, seen: Mapping[int, Files]) -> Finding:
    """Warning if other nodes' files appear late, or locks do not hold."""
    slowest = max(seen, key=lambda rank: seen[rank].seen_after_seconds)
    late, total = seen[slowest].seen_after_seconds, sum(files.rate for files in seen.values())
    write = max(files.write_seconds for files in seen.values())
    figures = {"seen_after_seconds": late, "write_seconds": write, "bytes_per_second": total}
    nodes = "1 node writes" if len(seen) == 1 else f"{len(seen)} nodes write"
    where = Path(context.config.run.directory).expanduser().absolute()
    found = f"{where}: {nodes} {total / 1e6:.0f} MB/s, a small file takes {write * 1e3:.0f} ms"
    if len(seen) > 1:
        found += f", others see it after {late * 1e3:.0f} ms"
    if late > LATE_SECONDS:
        advice = "raise server_client.heartbeat_timeout_seconds well above this, or mount with shorter attribute caching"
        return warning(f"{found} ({context.allocation.node_of(slowest)})", advice, figures)
    if without := [rank for rank, files in seen.items() if not files.locks_hold]:
        advice = "mount with locks across nodes (Lustre: -o flock) if reward functions or data sets need them"
        return warning(f"{found}; {who(context.allocation, without)}: got a lock that rank 0 holds", advice, figures)
    return ok(found, figures=figures)


@item(
    "ports",
    Where.every_node,
    seconds=60.0,
    needs=("filesystem",),
    advice="port 0 picks a free one; host 0.0.0.0 is every address of the server's node",
)
def ports(context: Context) -> dict[str, str]:
    """The servers that this node could not reach, with the reason."""
    config, allocation = context.config, context.allocation
    wanted = {server.name: server.settings for server in config.servers()}
    if not wanted:
        return {}
    listen("127.0.0.1", 0).close()  # PyTriton listens there
    directory = RunDirectory(Path(config.run.directory))
    for name, server in wanted.items():  # raises for a certificate or secret that cannot be used
        Access.for_server(directory.secret, server, name=name, own_tls=config.run.server_tls)
    Access.for_client(directory.secret, config.server_client, own_tls=config.run.server_tls)
    listeners = {}
    try:
        for name, server in wanted.items():
            try:
                listeners[name] = listen(server.host, server.port)
            except ServerError as error:
                raise ServerError(f"{name}: {error}") from error
        addresses = {name: f"{advertised_host(wanted[name], os.environ)}:{it.getsockname()[1]}" for name, it in listeners.items()}
        return _unreachable(allocation, addresses)
    finally:
        allocation.put(f"tried/{allocation.rank}", True)
        for rank in allocation.leaders():  # the ports stay open until all have tried
            _wait_for(allocation, "tried", rank, "try the ports")
        for listener in listeners.values():
            listener.close()


def _unreachable(allocation: Allocation, own: Mapping[str, str]) -> dict[str, str]:
    """Connect to the servers of the next node; failures by server."""
    has_other_components = os.environ.get("SLURM_HET_SIZE", "1") not in ("0", "1")  # on nodes of their own
    allocation.put(f"addresses/{allocation.rank}", dict(own))
    other = _next_node(allocation)
    addresses = _wait_for(allocation, "addresses", other, "listen")
    failed = {}
    for name, address in addresses.items():
        if address.startswith(_LOOPBACK) and (other != allocation.rank or has_other_components):
            failed[name] = f"{allocation.node_of(other)} would be called {address}, which every node has"
            continue
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            failed[name] = f"{address} ({allocation.node_of(other)}) cannot be reached: {error}"
    return failed


@ports.judged
def judge_ports(context: Context, seen: Mapping[int, dict[str, str]]) -> Finding:
    """Fatal if a server is unreachable from another node, or two servers with the same fixed port could share a node."""
    wanted = {server.name: server.settings for server in context.config.servers()}
    if not wanted:
        return ok("this run has no servers")
    same = ([name for name, its in wanted.items() if its.port == server.port and server.port] for server in wanted.values())
    if clash := next((names for names in same if len(names) > 1), None):
        text = f"{' and '.join(clash)} have the same port {wanted[clash[0]].port}: on one node only one of them can listen"
        advice = "give each its own port, or 0 (clients find it through the run directory)"
        return (warning if len(seen) > 1 else fatal)(text, advice)
    problems: dict[str, list[int]] = {}
    for rank, unreachable in seen.items():
        for name, why in unreachable.items():
            problems.setdefault(f"{name}: {why}", []).append(rank)
    if problems:
        text = "; ".join(f"{who(context.allocation, ranks)}: {why}" for why, ranks in list(problems.items())[:4])
        names = " and ".join(f"{name}.server.host" for name in wanted)
        advice = f"set {names} to 0.0.0.0 or to the cluster's interface; if it is set, let these nodes reach each other's ports"
        return fatal(text, advice)
    reach = f", reached from the other {'node' if len(seen) == 2 else 'nodes'}" if len(seen) > 1 else ""
    described = []
    for name, server in wanted.items():
        tls = " with TLS" if context.config.run.server_tls or server.tls_certificate else ""
        described.append(f"{name} on {server.host}, {f'port {server.port}' if server.port else 'a free port'}{tls}{reach}")
    return ok(", ".join(described))
