"""MPI over the nodes of a cluster."""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PLACE = """
import os
from aligner.errors import LaunchError
from aligner.parallel import launch
try:
    place = launch.join_mpi(os.environ)
    heard = launch.broadcast_text(launch.reachable_address(place) if place.rank == 0 else "", timeout_seconds=30)
    print(f"rank {place.rank}/{place.world_size}, here {place.local_rank}/{place.local_world_size}, rank 0 is at {heard}", flush=True)
    launch.shutdown()
except LaunchError as error:
    print(f"LaunchError: {error}", flush=True)
"""


@pytest.mark.mpi
def test_mpi_over_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """mpi4py with MPICH under pmi2 and with OpenMPI (where it is installed) under pmix; the wrong pairing is noticed."""
    (tmp_path / "place.py").write_text(PLACE)
    task = f"{sys.executable} {tmp_path}/place.py"
    openmpi = ctypes.util.find_library("mpi")
    script = [
        "#!/bin/bash",
        f"srun --mpi=pmi2 {task} > pmi2",
        f"srun --mpi=none {task} > none",
        f"MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI={openmpi} srun --mpi=pmix {task} > pmix" if openmpi else "",
        f"srun --mpi=pmix {task} > mpich_pmix" if openmpi else "",
    ]
    options = ("--nodes=2", "--ntasks=2", "--time=5")
    job = slurm.submit("\n".join(script) + "\n", options=options, directory=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    job.wait("COMPLETED", timeout_seconds=120)
    met = [f"rank {rank}/2, here 0/1, rank 0 is at {slurm.settings.address('n1')}" for rank in range(2)]
    for plugin in ("pmi2", "pmix") if openmpi else ("pmi2",):
        assert sorted((tmp_path / plugin).read_text().splitlines()) == met
    refused = (tmp_path / "none").read_text().splitlines()
    assert len(refused) == 2 and all("=2, but MPI gave this process a world of size 1" in line for line in refused)
    if openmpi:  # and with it Slurm's plugin for PMIx
        refused = (tmp_path / "mpich_pmix").read_text().splitlines()
        assert len(refused) == 2 and all("srun --mpi=pmix started this process, which speaks PMIx" in line for line in refused)
