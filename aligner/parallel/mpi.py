"""Bootstrap through MPI: who am I, and one broadcast of where rank 0 waits. The only importer of mpi4py (lazily)."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.errors import LaunchError

_MAX_TEXT_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiPlace:
    """This process's place in MPI_COMM_WORLD and among the ranks of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def join(environ: Mapping[str, str]) -> MpiPlace:
    """Start MPI. Collective over MPI_COMM_WORLD. Raises LaunchError without mpi4py, or where launcher and MPI library do not fit."""
    try:
        import mpi4py

        # A rank that dies of an exception must not wait in MPI_Finalize for the others; the launcher then stops them. See `finalize`.
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
    place = MpiPlace(rank=world.Get_rank(), world_size=world.Get_size(), local_rank=local.Get_rank(), local_world_size=local.Get_size())
    local.Free()
    return place


_ADVICE = (
    "Under srun choose --mpi=pmi2 for MPICH (also PyPI's mpich) and --mpi=pmix for Open MPI (slurm.mpi in a job's settings); with mpiexec "
    "or mpirun use the one of the same library"
)


def check_library(version: str, environ: Mapping[str, str]) -> None:
    """Raise LaunchError where an MPICH that was built without PMIx was started by PMIx: MPI_Init would end the process.

    `version` is what MPI_Get_library_version says.
    """
    built = next((line for line in version.splitlines() if line.startswith("MPICH configure:")), "pmix")
    spoken = "PMIX_RANK" in environ and not any(name in environ for name in ("PMI_RANK", "PMI_FD", "PMI_PORT"))
    if spoken and "pmix" not in built:
        known = {"OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun", "SLURM_JOB_ID": "srun --mpi=pmix"}
        launcher = next((name for variable, name in known.items() if variable in environ), "a launcher")
        raise LaunchError(f"{launcher} started this process, which speaks PMIx, but mpi4py loaded an MPICH without PMIx. {_ADVICE}")


def check_pairing(mpi_size: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError where the launcher started several tasks and MPI sees only one (PMI of launcher and library do not match)."""
    # The nearest launcher's word counts: mpirun -n 1 inside an allocation of eight tasks is right to give one.
    stated = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    if mpi_size == 1 and stated and environ[stated[0]] != "1":
        raise LaunchError(
            f"{stated[0]}={environ[stated[0]]}, but MPI gave this process a world of size 1: the MPI library that mpi4py loaded does not "
            f"speak the launcher's PMI. {_ADVICE}"
        )


def broadcast_text(text: str, *, timeout_seconds: float) -> str:
    """Rank 0's `text` (ASCII) on every rank. Collective. Raises LaunchError when it has not come in time."""
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


def reachable_address(place: MpiPlace) -> str:
    """An address of this machine that the other ranks can reach: loopback where all of them are here."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    # Many systems map their own name to loopback; connecting a datagram socket only picks a route, nothing is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            address = socket.gethostbyname(socket.gethostname())
            if address.startswith("127."):
                probe.connect(("192.0.2.1", 9))
                address = probe.getsockname()[0]
        except OSError as error:
            raise LaunchError(
                f"{socket.gethostname()} finds no address of its own for the other nodes ({error}); set ALIGNER_MASTER_ADDR"
            ) from error
    return address


def finalize() -> None:
    """Leave MPI, if this process joined it. Collective on the good path."""
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
