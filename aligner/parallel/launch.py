"""From any launcher to a `torch.distributed` world whose ranks agree with each other.

`detect_world` reads the environment, in this order; `ALIGNER_LAUNCH` (torchrun, slurm, mpi, single) overrides it:

1. torchrun: RANK and WORLD_SIZE are set (the local launcher of this project sets the same).
2. Slurm step: SLURM_PROCID inside a step (not the batch script, not the shell of an allocation). The store is on the first host of the
   step's node list, at port 15000 + crc32("<job id>.<step id>.<node list>") mod 15000: every rank computes the same one, outside the
   range from which Linux assigns ports.
3. MPI: an mpiexec / mpirun variable is set. Only then is mpi4py imported; rank 0 binds a free port and broadcasts its address.
4. Single process: no sockets at all.

ALIGNER_MASTER_ADDR and ALIGNER_MASTER_PORT override the address in cases 2 and 3.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from aligner.errors import LaunchError
from aligner.parallel import agreement, gloo, platform

# Step ids that Slurm gives to the batch script and to the shell of an interactive allocation.
_NOT_STEPS = ("4294967290", "4294967291")
_BACKLOG = 2048  # of the store: ranks that start at once
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_TEXT_BYTES = 512
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


class LaunchSource(str, Enum):
    """The launcher of the ranks."""

    torchrun = "torchrun"
    slurm = "slurm"
    mpi = "mpi"
    single = "single"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's place: `local_*` are within its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: LaunchSource

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size):
            raise LaunchError(
                f"{self.source.value} gives impossible ranks: rank {self.rank} of {self.world_size}, "
                f"local rank {self.local_rank} of {self.local_world_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The store where the ranks meet. `hosted`: the launcher (a torchrun agent) already runs it; else rank 0 binds it."""

    address: str
    port: int
    hosted: bool = False
    prefix: str = "aligner"


def detect_source(environ: Mapping[str, str]) -> LaunchSource:
    """The launcher of this process, from its environment alone."""
    forced = environ.get("ALIGNER_LAUNCH")
    if forced is not None:
        if forced not in LaunchSource.__members__:
            raise LaunchError(f"ALIGNER_LAUNCH={forced!r}; allowed: {', '.join(LaunchSource.__members__)}")
        return LaunchSource[forced]
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return LaunchSource.torchrun
    if _is_slurm_task(environ):
        return LaunchSource.slurm
    return LaunchSource.mpi if any(name in environ for name in _MPI_VARIABLES) else LaunchSource.single


def detect_world(environ: Mapping[str, str]) -> tuple[World | None, Rendezvous | None]:
    """This process's world and meeting point, from its environment alone (pure).

    Both are None under MPI, since only mpi4py knows them; the rendezvous is None for a single process. Raises LaunchError naming a variable
    that is missing or malformed.
    """
    source = detect_source(environ)
    if source is LaunchSource.torchrun:
        return _torchrun(environ)
    if source is LaunchSource.slurm:
        return _slurm(environ)
    if source is LaunchSource.mpi:
        return None, None
    return World(rank=0, world_size=1, local_rank=0, local_world_size=1, source=source), None


def initialize(
    backend: str,
    *,
    timeout_seconds: float,
    fingerprint: str,
    collective_timeout_seconds: float = 1800.0,
    claim_gpu: Callable[[World], str] = lambda world: "",
    environ: Mapping[str, str] | None = None,
) -> World:
    """Create the default process group and check that all ranks run the same thing. Every rank of the component calls it once.

    `timeout_seconds` limits each wait of the start; `collective_timeout_seconds` is the process group's own. `fingerprint` identifies the
    resolved configuration. `claim_gpu` makes the rank's GPU the current one and names it if the rank must have it alone (else "").

    Raises LaunchError for a missing rank, for a store that is unreachable or whose port is taken, for ranks that differ in world size,
    configuration or versions or share a GPU (on every rank, naming the ranks), and for an MPI pairing that gave worlds of 1.
    """
    platform.set_float32_matmul("highest")  # until a model's settings say otherwise
    world, store = meet(timeout_seconds=timeout_seconds, environ=environ)
    record = agreement.RankRecord(rank=world.rank, world_size=world.world_size, fingerprint=fingerprint, gpu=claim_gpu(world))
    agreement.check(store, record, timeout_seconds=timeout_seconds)
    gloo.share_devices(is_alone=world.world_size == 1)
    dist.init_process_group(
        backend,
        store=PrefixStore("process_group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=collective_timeout_seconds),
    )
    return world


def meet(*, timeout_seconds: float, environ: Mapping[str, str] | None = None) -> tuple[World, Store]:
    """This process's world and the store of its ranks, without a process group or waiting for all. Raises LaunchError."""
    environ = os.environ if environ is None else environ
    world, rendezvous = detect_world(environ)
    if world is None:
        world, store = _open_mpi(environ, timeout_seconds)
    else:
        store = _open_store(world, rendezvous, timeout_seconds)
    _keep_local_traffic_local(world)
    return world, store


SETTLE_SECONDS = 60


def shutdown() -> None:
    """Destroy the process groups and leave MPI, if either was started. Every rank calls it after success, not after an error."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a rank that failed meanwhile reports that itself
            gloo.settle(timedelta(seconds=SETTLE_SECONDS))
        dist.destroy_process_group()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()


def _keep_local_traffic_local(world: World) -> None:
    """Make gloo use loopback if all ranks are on this machine: laptops' own names often resolve slowly, wrongly or not at all."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if world.local_world_size == world.world_size and names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def _integer(environ: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is set, as an integer >= 0."""
    text = _text(environ, *names)
    if not text.isdigit():
        raise LaunchError(f"{next(name for name in names if name in environ)}={text!r} is not a whole number")
    return int(text)


def _text(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set."""
    for name in names:
        if name in environ:
            return environ[name]
    raise LaunchError(f"{' or '.join(names)} is not set, though the rest of the launcher's variables are")


def _torchrun(environ: Mapping[str, str]) -> tuple[World, Rendezvous]:
    world_size = _integer(environ, "WORLD_SIZE")
    world = World(
        rank=_integer(environ, "RANK"),
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK"),
        # Launchers that imitate torchrun may omit this one: then all ranks are assumed to be on this machine.
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size,
        source=LaunchSource.torchrun,
    )
    rendezvous = Rendezvous(
        address=_text(environ, "MASTER_ADDR"),
        port=_integer(environ, "MASTER_PORT"),
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # After a restart the agent's store still holds the keys of the previous attempt.
        prefix=f"aligner/attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
    return world, rendezvous


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun, not an MPI launcher inside its step, started this process as a task of a step."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or step in _NOT_STEPS or "SLURM_PROCID" not in environ:
        return False
    if "OMPI_COMM_WORLD_RANK" in environ:
        return False  # mpirun's daemons are the step's tasks; srun itself never sets this one
    # srun --mpi=pmi2 sets PMI_RANK to SLURM_PROCID; mpiexec's own ranks are numbered across its proxies.
    ours = (environ["SLURM_PROCID"], str(_integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")))
    return "PMI_RANK" not in environ or (environ["PMI_RANK"], environ.get("PMI_SIZE", ours[1])) == ours


def _slurm(environ: Mapping[str, str]) -> tuple[World, Rendezvous]:
    nodes = _text(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    node = _integer(environ, "SLURM_NODEID")
    counts = expand_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE lists {len(counts)} nodes")
    world = World(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=counts[node],
        source=LaunchSource.slurm,
    )
    seed = f"{_text(environ, 'SLURM_JOB_ID', 'SLURM_JOBID')}.{_text(environ, 'SLURM_STEP_ID', 'SLURM_STEPID')}.{nodes}"
    derived = _FIRST_PORT + crc32(seed.encode()) % _NUM_PORTS
    rendezvous = Rendezvous(
        address=environ.get("ALIGNER_MASTER_ADDR") or expand_hostlist(nodes)[0],
        port=_integer(environ, "ALIGNER_MASTER_PORT") if "ALIGNER_MASTER_PORT" in environ else derived,
    )
    return world, rendezvous


def _open_mpi(environ: Mapping[str, str], timeout_seconds: float) -> tuple[World, Store]:
    world = join_mpi(environ)
    if world.world_size == 1:
        return world, HashStore()
    # Rank 0 binds before it broadcasts, so no rank connects too early. Port 0 stands for any free one.
    port = _integer(environ, "ALIGNER_MASTER_PORT") if "ALIGNER_MASTER_PORT" in environ else 0
    address = environ.get("ALIGNER_MASTER_ADDR") or reachable_address(world)
    hosted = _bind(address, port, timeout_seconds) if world.rank == 0 else None
    announced = f"{address} {hosted.port}" if hosted is not None else ""
    address, number = broadcast_text(announced, timeout_seconds=timeout_seconds).split()
    store = hosted or _connect(world, address, int(number), timeout_seconds)
    return world, PrefixStore("aligner", store)


def _open_store(world: World, rendezvous: Rendezvous | None, timeout_seconds: float) -> Store:
    if rendezvous is None or world.world_size == 1:  # alone: no port that another program could take
        return HashStore()
    if world.rank == 0 and not rendezvous.hosted:
        store = _bind(rendezvous.address, rendezvous.port, timeout_seconds)
    else:
        store = _connect(world, rendezvous.address, rendezvous.port, timeout_seconds)
    return PrefixStore(rendezvous.prefix, store)


def _bind(address: str, port: int, timeout_seconds: float) -> TCPStore:
    """The store; only on loopback if the ranks meet there, since torch's own socket would listen on every interface."""
    timeout, listener = timedelta(seconds=timeout_seconds), -1
    try:
        if address in ("localhost", "127.0.0.1"):
            own = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)  # the store closes it
            port, listener = own.getsockname()[1], own.detach()
        has_libuv = torch.__version__ >= "2.8"  # before it, libuv's store takes no listener
        options = {} if listener < 0 else {"master_listen_fd": listener, "use_libuv": has_libuv}
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank 0 could not open the rendezvous store at {address}:{port}: {error}. If the port is taken (an earlier run?), "
            "set ALIGNER_MASTER_PORT (torchrun: MASTER_PORT) to a free one on every rank"
        ) from error


def _connect(world: World, address: str, port: int, timeout_seconds: float) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} waited {timeout_seconds:.0f} s for the rendezvous store of rank 0 at "
            f"{address}:{port} and could not connect ({error}). Did rank 0 start, and is that host reachable from here?"
        ) from error


def expand_hostlist(text: str) -> list[str]:
    """Host names in order: `n[01-03,7]` -> n01 n02 n03 n7; several brackets multiply. Raises LaunchError on a malformed list."""
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise LaunchError(f"Slurm node list {text!r} has unbalanced brackets")
    hosts: list[str] = []
    for part in re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text):  # at commas outside brackets
        choices = [_numbers(piece, text) if place % 2 else [piece] for place, piece in enumerate(re.split(r"[\[\]]", part))]
        hosts += map("".join, itertools.product(*choices))
    if not hosts:
        raise LaunchError(f"Slurm node list {text!r} names no host")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks per node: `4(x2),3` -> [4, 4, 3]. Raises LaunchError on a malformed list."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            raise LaunchError(f"Slurm tasks-per-node list {text!r} is malformed at {part!r}; expected for example 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(ranges: str, whole: str) -> list[str]:
    """`01-03,7` -> 01 02 03 7 (the width of a range's first number is kept)."""
    found: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise LaunchError(f"Slurm node list {whole!r} has a malformed range {item!r}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def join_mpi(environ: Mapping[str, str]) -> World:
    """Start MPI. Collective over MPI_COMM_WORLD. Raises LaunchError without mpi4py, or if launcher and MPI library do not match."""
    try:
        import mpi4py

        # A rank that dies of an exception must not wait in MPI_Finalize for the others; the launcher then stops them. See `shutdown`.
        mpi4py.rc.finalize = False
        mpi4py.rc.initialize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            check_library(MPI.Get_library_version(), environ)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except (ImportError, RuntimeError) as error:
        raise LaunchError(f"an MPI launcher started this process, but mpi4py does not load: {error}. pip install 'aligner[mpi]'") from error
    world = MPI.COMM_WORLD
    check_pairing(world.Get_size(), environ)
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = World(
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=local.Get_rank(),
        local_world_size=local.Get_size(),
        source=LaunchSource.mpi,
    )
    local.Free()
    return place


_ADVICE = (
    "Under srun choose --mpi=pmi2 for MPICH (also PyPI's mpich) and --mpi=pmix for Open MPI (slurm.mpi in a job's settings); with mpiexec "
    "or mpirun use the one of the same library"
)


def check_library(version: str, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if PMIx started an MPICH (by MPI_Get_library_version) without PMIx: MPI_Init would end the process."""
    built = next((line for line in version.splitlines() if line.startswith("MPICH configure:")), "pmix")
    spoken = "PMIX_RANK" in environ and not any(name in environ for name in ("PMI_RANK", "PMI_FD", "PMI_PORT"))
    if spoken and "pmix" not in built:
        known = {"OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun", "SLURM_JOB_ID": "srun --mpi=pmix"}
        launcher = next((name for variable, name in known.items() if variable in environ), "a launcher")
        raise LaunchError(f"{launcher} started this process, which speaks PMIx, but mpi4py loaded an MPICH without PMIx. {_ADVICE}")


def check_pairing(mpi_size: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if the launcher started several tasks and MPI sees only one (PMI of launcher and library do not match)."""
    # The nearest launcher counts: mpirun -n 1 inside an allocation of eight tasks rightly gives one.
    stated = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    if mpi_size == 1 and stated and environ[stated[0]] != "1":
        raise LaunchError(
            f"{stated[0]}={environ[stated[0]]}, but MPI gave this process a world of size 1: the MPI library that mpi4py loaded does not "
            f"speak the launcher's PMI. {_ADVICE}"
        )


def broadcast_text(text: str, *, timeout_seconds: float) -> str:
    """Rank 0's `text` (ASCII) on every rank. Collective. Raises LaunchError if it does not arrive in time."""
    from mpi4py import MPI

    buffer = bytearray(text.encode("ascii").ljust(_MAX_TEXT_BYTES))
    request = MPI.COMM_WORLD.Ibcast(buffer, root=0)
    deadline = time.monotonic() + timeout_seconds
    while not request.Test():
        if time.monotonic() > deadline:
            rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
            raise LaunchError(f"rank {rank} of {size} waited {timeout_seconds:.0f} s for rank 0's MPI broadcast of the rendezvous address")
        time.sleep(0.005)
    return buffer.decode("ascii").strip()


def reachable_address(place: World) -> str:
    """An address of this machine that the other ranks can reach: loopback if all of them are here."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    # Many systems map their own name to loopback. Connecting a datagram socket only picks a route and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            address = socket.gethostbyname(socket.gethostname())
            if address.startswith("127."):
                probe.connect(("192.0.2.1", 9))
                address = probe.getsockname()[0]
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()} has no address for the other nodes ({error}); set ALIGNER_MASTER_ADDR") from error
    return address
