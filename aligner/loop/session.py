"""What every component does first and last: meet the other ranks, lay them out, open the run directory, leave."""

from __future__ import annotations

import faulthandler
import os
import platform as machine
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aligner import user_code
from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode
from aligner.cluster.lease import watch_lease
from aligner.cluster.run_directory import RunDirectory
from aligner.config import fingerprint, to_yaml
from aligner.data.report import LoadReport
from aligner.errors import AlignerError, ConfigError, ServerError, describe_os_error
from aligner.loop.changes import check_changes
from aligner.loop.config import RunConfig
from aligner.parallel import launch, platform, topology
from aligner.parallel.collective_marks import marked
from aligner.parallel.collectives import from_rank_0, raise_everywhere
from aligner.parallel.progress import Progress
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.parallel.watch import Place, Watch, clear_last_report
from aligner.rollout.config import EngineKind
from aligner.servers.registry import Publication, make_registration

HEARTBEAT_SECONDS = 2.0
SERVERS = ("critic", "reward")  # components that answer the other one


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One rank of a running component."""

    topology: Topology
    directory: RunDirectory
    config_yaml: str
    progress: Progress = field(default_factory=Progress)
    reports: list[LoadReport] = field(default_factory=list)  # of the data that it trains on

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes files and talks to people."""
        return self.topology.rank == 0

    def say(self, text: str) -> None:
        """A line for the person who watches, from rank 0."""
        if self.is_first:
            print(text, flush=True)

    def trains_on(self, report: LoadReport) -> None:
        """Say what was read; what was not used of it is said again at the end."""
        self.reports.append(report)
        self.say(report.summary())


def see_own_gpus(config: Any, local_rank: int) -> None:
    """Hide the GPUs of other replicas from a rank with an engine that would take the first it sees; before anything uses a GPU."""
    rollout = getattr(config, "rollout", None)
    if rollout is not None and rollout.engine is not EngineKind.megatron:
        platform.see_block(local_rank, rollout.tp or config.parallel.tp)


@contextmanager
def open_session(config: Any, run: RunConfig, parallel: ParallelConfig, *, component: str, writes_config: bool = True) -> Iterator[Session]:
    """Join the component's ranks and make its groups; leave them at the good end. `component` is what its files are called by.

    Meanwhile the rank's health is in the run directory, and a component that stands still for `run.stall_timeout_seconds` is ended.
    After an error the groups are left to the process's end: other ranks may hang in a collective, and the launcher ends them.
    """
    watch_lease(os.environ)  # whatever hangs below: this process leaves when whoever started it is gone
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    world, _ = launch.detect_world(os.environ)
    if world is not None:
        parallel.check_world(world.world_size)  # before anything starts
        see_own_gpus(config, world.local_rank)
        platform.select_device(world.local_rank)
    world = launch.initialize(
        platform.backend(),
        timeout_seconds=run.start_timeout_seconds,
        collective_timeout_seconds=run.collective_timeout_seconds,
        fingerprint=fingerprint(config),
    )
    platform.select_device(world.local_rank)
    layout = topology.initialize(parallel, seed=run.seed)
    directory = RunDirectory(Path(run.directory))
    yaml = to_yaml(config)
    incarnation = from_rank_0(lambda: _open(directory, component, config, yaml if writes_config else ""))
    _record_calls(directory, component, layout.rank)
    progress = Progress()
    place = Place(
        component=component,
        rank=layout.rank,
        world_size=layout.world_size,
        host=os.environ.get("SLURMD_NODENAME") or machine.node(),  # every step of a Slurm job inherits the batch script's HOSTNAME
        incarnation=incarnation,
        attempt=os.environ.get("ALIGNER_ATTEMPT", ""),
        servers=SERVERS if component not in SERVERS else (),
    )
    watch = Watch(
        progress,
        place,
        health=directory.health,
        stacks=directory.stacks,
        stall_seconds=run.stall_timeout_seconds,
        last_words=lambda text: outcomes.record(os.environ, ExitCode.failed, " ".join(text.splitlines()[:2])),
    )
    watch.start()
    faulthandler.enable(file=2)
    try:
        with marked(progress):
            yield Session(topology=layout, directory=directory, config_yaml=yaml, progress=progress)
            launch.shutdown()
        progress.enter_phase("done")
    except BaseException as error:
        progress.enter_phase(f"failed ({type(error).__name__})")
        raise
    finally:
        watch.stop()


def _record_calls(directory: RunDirectory, component: str, rank: int) -> None:
    """Every rank calls it; raises ConfigError on all of them where one cannot write."""
    refused: ConfigError | None = None
    try:
        user_code.record_in(directory.calls(component, rank))
    except OSError as error:
        refused = ConfigError(f"run.directory={directory.path}: rank {rank}: {describe_os_error(error, directory)}")
    raise_everywhere(refused)


def _open(directory: RunDirectory, component: str, config: Any, config_yaml: str) -> str:
    """Make the run directory and write the configuration into it (where there is one). Returns a name for this start of the component.

    Raises ConfigError where the directory is another experiment's, or cannot be used.
    """
    try:
        directory.create()
        clear_last_report(directory.stacks, component)
        if config_yaml:
            if changes := check_changes(directory, type(config), config_yaml, allowed=config.run.allow_changes):
                print(changes, flush=True)
            directory.config.write_text(config_yaml)
    except OSError as error:
        raise ConfigError(f"run.directory={directory.path}: {describe_os_error(error, directory)}") from error
    return uuid.uuid4().hex


@contextmanager
def announced(session: Session, name: str, *, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> Iterator[Publication | None]:
    """Say that this component is loading; on rank 0 the publication that will say that it is ready, None elsewhere. Every rank calls it.

    Raises, on every rank, ServerError where a component of this name and attempt is running already, ConfigError where it cannot say so.
    """
    layout = session.topology
    text = f"tp{layout.tp_size} pp{layout.pp_size} cp{layout.cp_size} dp{layout.dp_size}"
    publication: Publication | None = None
    error: AlignerError | None = None
    if session.is_first:
        try:
            registration = make_registration(name=name, role=name, num_ranks=layout.world_size, layout=text)
            publication = Publication(session.directory.services, registration, heartbeat_seconds)
        except ServerError as failed:
            error = failed
        except OSError as failed:  # the other ranks wait below
            error = ConfigError(f"run.directory={session.directory.path}: {describe_os_error(failed, session.directory.services)}")
    raise_everywhere(error)
    try:
        yield publication
    finally:
        if publication is not None:
            publication.withdraw()
