"""Who am I, from environments as the launchers make them; the agreement of the ranks over an in-memory store."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from zlib import crc32

import pytest
import torch
from torch.distributed import HashStore
from torch.torch_version import TorchVersion

from aligner.errors import LaunchError
from aligner.parallel import agreement, launch
from aligner.parallel.launch import LaunchSource, Rendezvous, World, detect_source, detect_world, expand_counts, expand_hostlist

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
# Rank 3 of `srun -n 5` on three nodes that run 2, 2 and 1 tasks.
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "node[01-02],gpu4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],gpu4", ["node01", "node02", "node03", "node7", "gpu4"]),
        ("localhost", ["localhost"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[1-2]n[08-09]-ib", ["rack1n08-ib", "rack1n09-ib", "rack2n08-ib", "rack2n09-ib"]),
        ("a,b[1,3]", ["a", "b1", "b3"]),
    ],
)
def test_hostlist(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1-", "node[3-1]", "node[a-b]", "node[[1]]", "node]1["])
def test_malformed_lists(text):
    with pytest.raises(LaunchError, match="node list"):
        expand_hostlist(text)
    assert expand_counts("4(x2),3") == [4, 4, 3]
    with pytest.raises(LaunchError, match="4x2"):
        expand_counts("4x2")


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
LAST = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
OVERRIDE = {"ALIGNER_MASTER_PORT": "4444", "ALIGNER_MASTER_ADDR": "10.1.1.1"}
PORT = 15000 + crc32(b"77.0.node[01-02],gpu4") % 15000  # components of a heterogeneous job differ in their nodes alone


@pytest.mark.parametrize(
    ("environ", "place", "meeting"),
    [
        (TORCHRUN, (5, 8, 1, 4), ("10.0.0.1", 29500, False, "aligner/attempt_0")),
        (TORCHRUN | AGENT, (5, 8, 1, 4), ("10.0.0.1", 29500, True, "aligner/attempt_2")),  # its store keeps an earlier attempt's keys
        (SLURM, (3, 5, 1, 2), ("node01", PORT, False, "aligner")),
        (SLURM | LAST, (4, 5, 0, 1), ("node01", PORT, False, "aligner")),
        (SLURM | OVERRIDE, (3, 5, 1, 2), ("10.1.1.1", 4444, False, "aligner")),
    ],
)
def test_world_and_meeting_point(environ, place, meeting):
    world, rendezvous = detect_world(environ)
    source = LaunchSource.slurm if "SLURM_JOB_ID" in environ else LaunchSource.torchrun
    rank, world_size, local_rank, local_world_size = place
    assert world == World(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, source=source)
    assert rendezvous == Rendezvous(**dict(zip(("address", "port", "hosted", "prefix"), meeting, strict=True)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: None}, name) for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")),
        ({"MASTER_PORT": "port"}, "MASTER_PORT='port'"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"ALIGNER_LAUNCH": "ray"}, "ALIGNER_LAUNCH='ray'; allowed: torchrun, slurm, mpi, single"),
    ],
)
def test_wrong_variables_are_named(change, message):
    with pytest.raises(LaunchError, match=message):
        detect_world({name: value for name, value in (TORCHRUN | change).items() if value is not None})


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_batch_script_and_allocation_shell_are_single_processes(step):
    environ = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-8]", **step}
    world, rendezvous = detect_world(environ)
    assert world == World(rank=0, world_size=1, local_rank=0, local_world_size=1, source=LaunchSource.single)
    assert rendezvous is None


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({}, "single"),
        (TORCHRUN, "torchrun"),
        ({**SLURM, **TORCHRUN}, "torchrun"),
        (SLURM, "slurm"),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"}, "slurm"),  # srun --mpi=pmi2
        ({**SLURM, "PMIX_RANK": "3"}, "slurm"),  # srun --mpi=pmix
        ({**SLURM, "PMI_RANK": "9", "PMI_SIZE": "20"}, "mpi"),  # mpiexec's proxies are the step's tasks
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "3"}, "mpi"),  # mpirun's daemons are the step's tasks
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpi"),
        ({"PMIX_RANK": "0"}, "mpi"),
        ({**SLURM, "ALIGNER_LAUNCH": "mpi"}, "mpi"),
        ({**TORCHRUN, "ALIGNER_LAUNCH": "single"}, "single"),
    ],
)
def test_source(environ, source):
    assert detect_source(environ).value == source


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_wrong_mpi_pairing_is_explained(name):
    with pytest.raises(LaunchError, match=f"{name}=4.*--mpi=pmi2.*--mpi=pmix"):
        launch.check_pairing(1, {name: "4"})
    launch.check_pairing(4, {name: "4"})
    launch.check_pairing(1, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "8"})  # one rank inside a larger allocation is right


MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi{}\nMPICH CC:           cc\n"


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("SLURM_JOB_ID", "srun --mpi=pmix"), ("A", "a launcher")],
)
def test_an_mpich_that_a_pmix_launcher_started_is_refused_before_it_aborts(variable, launcher):
    environ = {"PMIX_RANK": "0", variable: "2"}
    with pytest.raises(LaunchError, match=f"^{launcher} started this process, .* MPICH without PMIx.*--mpi=pmi2.*--mpi=pmix"):
        launch.check_library(MPICH.format(""), environ)
    launch.check_library(MPICH.format(" --with-pmix=/opt/pmix"), environ)
    launch.check_library("Open MPI v5.0.11, package: Open MPI", environ)
    launch.check_library(MPICH.format(""), environ | {"PMI_FD": "9"})  # a launcher that speaks both


@pytest.mark.mpi
def test_the_process_ends_with_our_error_and_not_with_mpichs_abort():
    program = "import os; from aligner.parallel import launch; launch.join_mpi(os.environ)"
    environ = {**os.environ, "PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert "LaunchError: a launcher started this process, which speaks PMIx" in done.stderr and "Abort(" not in done.stderr


def record(rank, *, world_size=2, fingerprint="abc", torch="2.13.0"):
    own = {"world_size": world_size, "fingerprint": fingerprint, "aligner": "0.1.0", "torch": torch}
    return agreement.RankRecord(rank=rank, host=f"h{rank}", gpu="", **own)


def test_differences_names_rank_and_field():
    assert agreement.differences(record(0), record(1)) == ""
    text = agreement.differences(record(0), record(1, fingerprint="xyz", torch="2.6.0"))
    assert text == "rank 1 on h1: fingerprint is 'xyz' and not 'abc', torch is '2.6.0' and not '2.13.0'"


def test_ranks_on_the_same_gpu_are_refused():
    records = [replace(record(rank, world_size=5), host="h0", gpu=f"GPU-{letter}") for rank, letter in enumerate("abaac")]
    (text,) = agreement.crowded([*records, replace(records[0], host="h1"), replace(records[0], gpu=""), replace(records[0], gpu="")])
    assert text.startswith("ranks 0, 2-3 are on the same GPU of h0 (GPU-a)") and text.endswith("run.ranks_per_gpu=3")
    first, second = (replace(record(rank), host="h0", gpu="GPU-a") for rank in (0, 1))
    store = HashStore()
    store.set("record/1", json.dumps(asdict(second)))
    with pytest.raises(LaunchError, match="do not fit together: ranks 0-1 are on the same GPU of h0"):
        agreement.check(store, first, timeout_seconds=0.2)


def test_missing_ranks_are_named():
    with pytest.raises(LaunchError, match=re.escape("ranks 1-2 of 3 did not come within 0 s")):
        agreement.check(HashStore(), record(0, world_size=3), timeout_seconds=0.2)


def test_two_processes_with_one_rank():
    store = HashStore()
    store.add("claims/1", 1)
    with pytest.raises(LaunchError, match="two processes call themselves rank 1"):
        agreement.check(store, record(1), timeout_seconds=0.2)


def test_rank_that_rank_0_does_not_know_of_finds_out_itself():
    store = HashStore()
    agreement.check(store, record(0, world_size=1), timeout_seconds=1)
    with pytest.raises(LaunchError, match="rank 3 on h3: world_size is 4 and not 1"):
        agreement.check(store, record(3, world_size=4), timeout_seconds=1)


ALONE = """
import socket, torch
import torch.distributed as dist
from aligner.parallel import gloo, launch
launch.initialize("gloo", timeout_seconds=30, fingerprint="x")
dist.all_reduce(torch.ones(2), group=dist.new_group([0], backend="gloo"))
print("listening:", sorted(gloo._listening()), flush=True)
launch.shutdown()
"""


@pytest.mark.parametrize("as_nobody", [False, True])
def test_a_rank_that_is_alone_listens_nowhere(as_nobody):
    """Whoever the process is: gloo's port is closed, which takes no privilege."""
    if as_nobody and os.geteuid() != 0:
        pytest.skip("this process is an ordinary user's already")
    user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"] if as_nobody else []
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI"))}
    done = subprocess.run([*user, sys.executable, "-c", ALONE], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "listening: []\n", done.stderr


@pytest.mark.parametrize("version, has_libuv", [("2.6.0", False), ("2.7.1+cpu", False), ("2.8.0", True), ("2.10.0", True)])
def test_the_store_takes_a_listener_in_every_torch(version: str, has_libuv: bool, monkeypatch: pytest.MonkeyPatch):
    """Before 2.8 only the store without libuv does."""

    def store(address: str, port: int, *, master_listen_fd: int, use_libuv: bool, **_: object) -> bool:
        os.close(master_listen_fd)
        return use_libuv

    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(launch, "TCPStore", store)
    assert launch._bind("127.0.0.1", 0, 1.0) is has_libuv
