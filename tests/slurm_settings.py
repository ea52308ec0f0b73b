"""What a test cluster consists of, and the files that Slurm reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NETWORK = "10.77.0"  # inside the cluster's own network namespace: nobody else sees it
HEAD = "head"
# Socket addresses hold 108 bytes; Slurm and PMIx append up to 50 to the directories that they are given.
_LONGEST_PATH = 64

_CONF = """\
ClusterName=test
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
# PMIx keeps its directories of a step here: they must differ between nodes that share /tmp
TmpFS={directory}/tmp/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPort={port}
SlurmdPort={slurmd_port}
{processes}
JobAcctGatherType=jobacct_gather/none
{accounting}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=10
SchedulerType={scheduler}
# only the backfill scheduler starts heterogeneous jobs; its default interval is 30 s
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,bf_max_time=60,sched_min_interval=100000
# quick detection of failures; the defaults are minutes
SlurmdTimeout=10
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=20
KillWait=3
UnkillableStepTimeout=30
InactiveLimit=0
WaitTime=0
ReturnToService=2
MinJobAge=86400
SlurmdParameters=config_overrides
{gres_types}
{nodes}
PartitionName=batch Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""

# Priorities of jobs are those of their QOS alone, and a job is warned before a better one takes its nodes (preemption with grace).
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass={directory}/munge.sock
AccountingStorageEnforce=associations,limits,qos
PriorityType=priority/multifactor
PriorityWeightQOS=1000
PreemptType=preempt/qos
PreemptMode=CANCEL"""
_DATABASE = """\
DbdHost={head}
DbdAddr={address}
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
LogFile={directory}/slurmdbd.log
PidFile={directory}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""
DATABASE_PORT, _DBD_PORT = 23306, 26819  # of the cluster's own network

# Never started: they only let `sbatch --test-only` judge a job for a cluster of that size.
_PHANTOMS = """\
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=-1
ResumeTimeout=60000
NodeName=p[1-{count}] CPUs=128 Sockets=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000{gres} State=CLOUD
PartitionName=phantom Nodes=p[1-{count}] MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """Every node is a set of namespaces with its own address and hostname, and so is the whole cluster. CPUs and memory are what Slurm is
    told, not what is there."""

    directory: Path
    num_nodes: int = 3
    num_gpus: int = 8
    gpu_type: str = ""
    num_cpus: int = 16
    memory_mb: int = 64000
    num_phantoms: int = 64
    preemption_warns: bool = True  # with the signal that a job asked for, where there is an accounting database; else with SIGTERM
    cgroups: bool = False  # Slurm tracks processes with control groups, and holds jobs to their memory
    accounting: bool = False  # slurmdbd and MariaDB
    scheduler: str = "sched/backfill"  # sched/builtin starts no heterogeneous jobs

    def __post_init__(self) -> None:
        if len(str(self.directory)) > _LONGEST_PATH:
            raise ValueError(f"directory is {self.directory}; allowed: at most {_LONGEST_PATH} characters (Unix sockets lie in it)")

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.num_nodes + 1))

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.directory / "hosts"

    @property
    def name_services(self) -> Path:
        return self.directory / "nsswitch.conf"

    @property
    def devices(self) -> list[Path]:
        return [self.directory / f"gpu{number}" for number in range(self.num_gpus)]

    def address(self, node: str) -> str:
        """The IPv4 address of a node or of the head."""
        return f"{NETWORK}.{254 if node == HEAD else self.nodes.index(node) + 1}"

    def save(self) -> None:
        (self.directory / "settings.json").write_text(json.dumps(asdict(self), default=str))


def load_settings(directory: Path) -> ClusterSettings:
    fields = json.loads((directory / "settings.json").read_text())
    return ClusterSettings(**fields | {"directory": Path(fields["directory"])})


def write_files(settings: ClusterSettings) -> None:
    directory = settings.directory
    for name in ("state", "spool", "tmp", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in settings.nodes)):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = "".join(f"{settings.address(node)} {node}\n" for node in (HEAD, *settings.nodes))
    settings.hosts.write_text(f"127.0.0.1 localhost\n{names}")
    # A node has no name server: every reverse look-up (the TCPStore of torch makes one for each client) would take 10 s.
    settings.name_services.write_text("passwd: files\ngroup: files\nhosts: files\n")
    settings.conf.write_text(_conf(settings))
    devices = f"{directory}/gpu[0-{settings.num_gpus - 1}]"
    kind = f" Type={settings.gpu_type}" if settings.gpu_type else ""
    gres = f"NodeName=n[1-{settings.num_nodes}] Name=gpu{kind} File={devices}\n" if settings.num_gpus else ""
    if settings.accounting:
        place = {"head": HEAD, "address": settings.address(HEAD), "directory": directory, "port": _DBD_PORT, "storage_port": DATABASE_PORT}
        (directory / "slurmdbd.conf").write_text(_DATABASE.format(**place))
        (directory / "slurmdbd.conf").chmod(0o600)
    if settings.cgroups:
        (directory / "cgroup.conf").write_text("ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n")
    (directory / "gres.conf").write_text(f"AutoDetect=off\n{gres}")


def _conf(settings: ClusterSettings) -> str:
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    gres = f" Gres=gpu:{kind}{settings.num_gpus}" if settings.num_gpus else ""
    lines = []
    for node in settings.nodes:
        sizes = f"CPUs={settings.num_cpus} RealMemory={settings.memory_mb}{gres}"
        lines.append(f"NodeName={node} NodeAddr={settings.address(node)} {sizes} State=UNKNOWN")
    text = _CONF.format(
        head=HEAD,
        head_address=settings.address(HEAD),
        directory=settings.directory,
        port=26817,
        scheduler=settings.scheduler,
        processes="ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
        if settings.cgroups
        else "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none",
        accounting=_ACCOUNTING.format(address=settings.address(HEAD), directory=settings.directory, port=_DBD_PORT)
        + ("\nSlurmctldParameters=preempt_send_user_signal" if settings.preemption_warns else "")
        if settings.accounting
        else "AccountingStorageType=accounting_storage/none",
        slurmd_port=26818,
        nodes="\n".join(lines),
        num_nodes=settings.num_nodes,
        gres_types="GresTypes=gpu" if settings.num_gpus else "",
    )
    return text + (
        _PHANTOMS.format(count=settings.num_phantoms, gres=f" Gres=gpu:{kind}8" if settings.num_gpus else "")
        if settings.num_phantoms
        else ""
    )
