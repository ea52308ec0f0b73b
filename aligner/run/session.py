"""Start and end of every component: join the ranks, make the groups, open the run directory, leave.

`check_changes` compares a run's settings with those of its newest checkpoint. A checkpoint holds the settings that made it. Settings of
memory, speed, layout, length, logging and monitoring may change on resume. With a change of the others (data, model, batches, losses,
rewards, seed), the numbers before and after would not belong to one experiment.
"""

from __future__ import annotations

import faulthandler
import os
import platform as machine
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from aligner.cluster import outcomes
from aligner.cluster.lease import watch_lease
from aligner.cluster.outcomes import ExitCode
from aligner.cluster.run_directory import POLICY, REWARD_MODEL, RunDirectory
from aligner.data.report import LoadReport
from aligner.errors import AlignerError, ConfigError, ServerError, describe_os_error
from aligner.models.checkpoint import files
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import from_rank_0, raise_everywhere
from aligner.parallel.progress import Progress, marked
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.parallel.watch import Place, Watch, clear_last_report
from aligner.rollout.config import EngineKind, RolloutConfig
from aligner.run.from_hub import meeting_seconds, with_names
from aligner.run.settings import RunConfig
from aligner.servers.components import SERVERS
from aligner.servers.registry import Publication, make_registration
from aligner.settings import user_code
from aligner.settings.compose import fingerprint, to_yaml
from aligner.settings.explain import recipe_with
from aligner.settings.schema import SchemaKey, flat, is_known, schema_keys
from aligner.telemetry import recording

_NOT_SET = "(not set)"
_SHOWN = 12  # changes that a message lists
_HARMLESS = (
    *("run.[!s]*", "run.server_tls", "loop.*", "guard.*", "checkpoint.*", "logging.*", "local_launcher.*", "server_client.*"),
    *("cluster.*", "slurm.*", "container.*"),
    *("parallel.*", "*.parallel.*", "num_processes", "*.num_processes", "*.environment", "*.server.*", "critic.accept_gap"),
    *("*timeout_seconds", "*num_threads", "environment.num_workers", "validation.*"),
    *("data.validation", "data.num_validation_prompts", "data.cache", "data.num_workers", "algorithm.validation_batch_size"),
    *("*optimizer.offload", "*optimizer.cpu_offload*", "*optimizer.nvme_path", "*optimizer.distributed"),
    *(
        f"*model.{name}"
        for name in (
            *("micro_batch_size", "micro_batch_tokens", "packing", "share_prompts", "recompute", "layers", "batch_invariant"),
            *("logits_chunk_size", "make_vocab_divisible_by"),
        )
    ),
    *("rollout.[!sa]*", "rollout.share_work"),  # all but the sampling and how far the sampler may be ahead
)


def check_changes(directory: RunDirectory, schema: type, config_yaml: str, *, allowed: bool) -> str:
    """A message on the settings that differ from the newest checkpoint's; empty if none does.

    `config_yaml`: the current settings, of `schema`. Without a checkpoint there is nothing to compare. Raises ConfigError for changes
    that make it another experiment, unless they are `allowed`.
    """
    newest = _newest(directory)
    if newest is None:
        return ""
    before, keys = _read(newest / "config.yaml"), list(schema_keys(schema))
    changes = _changes(before, yaml.safe_load(config_yaml), keys)
    if not allowed and any(not is_known(name, keys) for name in changes) and (recipe := recipe_with([name for name, _ in flat(before)])):
        raise ConfigError(f"run.directory={directory.path}: this is a run of {recipe}; name another directory")
    other = {name: change for name, change in changes.items() if not any(fnmatchcase(name, pattern) for pattern in _HARMLESS)}
    if other and not allowed:
        raise ConfigError(
            f"run.directory={directory.path}: its checkpoint {newest.name} was made with other settings: {_listed(other)}. That would be "
            "another experiment: name another directory, or set run.allow_changes=true to continue with these"
        )
    if not changes:
        return ""
    return f"{'warning: ' if other else ''}settings changed since {newest.name}: {_listed(changes)}"


def _newest(directory: RunDirectory) -> Path | None:
    steps: dict[int, Path] = {}
    for folder in (POLICY, REWARD_MODEL):
        steps |= files.complete_steps(directory.checkpoints / folder)
    return steps[max(steps)] if steps else None


def _read(path: Path) -> Any:
    """The settings in a checkpoint; None if missing or damaged (loading it will report that)."""
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _changes(before: Any, now: Any, keys: list[SchemaKey]) -> dict[str, tuple[Any, Any]]:
    """(before, now) by setting. A setting added to the schema since is no change; one removed, or never in it, is."""
    if not isinstance(before, dict):
        return {}
    old, new = ({name: value for name, value in flat(tree) if value != {}} for tree in (before, now))
    gained = {key.key for key in keys if key.key not in old and not key.open}
    return {
        name: (old.get(name, _NOT_SET), new.get(name, _NOT_SET))
        for name in (*new, *(name for name in old if name not in new))
        if old.get(name, _NOT_SET) != new.get(name, _NOT_SET) and name not in gained
    }


def _listed(changes: dict[str, tuple[Any, Any]]) -> str:
    shown = [f"{name}: {before} -> {now}" for name, (before, now) in list(changes.items())[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else "")


HEARTBEAT_SECONDS = 2.0
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One rank of a running component."""

    topology: Topology
    directory: RunDirectory
    config_yaml: str
    progress: Progress = field(default_factory=Progress)
    reports: list[LoadReport] = field(default_factory=list)  # of the data that it trains on
    last_words: list[str] = field(default_factory=list)  # printed at the end of a run too

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes files and prints messages."""
        return self.topology.rank == 0

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.is_first:
            print(text, flush=True)

    def trains_on(self, report: LoadReport) -> None:
        """Print what was read; unused parts are reported again at the end."""
        self.reports.append(report)
        self.say(report.summary())


def see_own_gpus(config: Any, local_rank: int) -> None:
    """Hide other replicas' GPUs from a rank whose engine takes the first visible one. Call before anything uses a GPU."""
    rollout = config.sampler
    if rollout is not None and rollout.engine != EngineKind.megatron:
        platform.see_block(local_rank, rollout.tp or config.parallel.tp)


def prepare_environment(config: Any, parallel: ParallelConfig) -> dict[str, str]:
    """Set what CUDA, NCCL and torch read of the environment when they are first used; see `platform.prepare_environment`."""
    rollout = config.sampler if parallel is config.parallel else None
    return platform.prepare_environment(
        exchanges=parallel.tp > 1 or parallel.cp > 1,
        asynchronous=rollout is not None and rollout.asynchronous.max_staleness > 0,
        hands_memory=rollout is not None and _may_wrap(rollout),
    )


def _may_wrap(rollout: RolloutConfig) -> bool:
    """Whether an engine of another package may sample: which one rollout.engine=auto takes is not known before the GPUs are used."""
    if rollout.engine == EngineKind.auto:
        return any(find_spec(package) for package in ("vllm", "tensorrt_llm"))
    return rollout.engine != EngineKind.megatron


@contextmanager
def open_session(
    config: Any, run: RunConfig, parallel: ParallelConfig, *, component: str, recipe: str = "", writes_config: bool = True
) -> Iterator[Session]:
    """Join the component's ranks and make its groups; destroy them on success. `component` names its files; `recipe` is recorded.

    Meanwhile the rank's health is in the run directory, and a component stalled for `run.stall_timeout_seconds` is ended.
    After an error the groups stay until the process ends: other ranks may hang in a collective, and the launcher ends them.
    """
    watch_lease(os.environ)  # whatever hangs below: this process leaves when whoever started it is gone
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    prepare_environment(config, parallel)
    world, _ = launch.detect_world(os.environ)
    if world is not None:
        _check_ranks(config, component, world.world_size)
        parallel.check_world(world.world_size)  # before anything starts
        see_own_gpus(config, world.local_rank)
    written = to_yaml(with_names(config))
    world = launch.initialize(
        platform.backend(run.ranks_per_gpu),
        timeout_seconds=meeting_seconds(config),
        collective_timeout_seconds=run.collective_timeout_seconds,
        claim_gpu=lambda world: platform.claim_device(world.local_rank, ranks_per_gpu=run.ranks_per_gpu),
        fingerprint=fingerprint(written),
    )
    if run.numa_binding and (reason := platform.bind_to_node()):
        print(f"run.numa_binding=true: rank {world.rank} stays where it is: {reason}", flush=True)
    _check_ranks(config, component, world.world_size)  # MPI tells only now
    layout = topology.initialize(parallel, seed=run.seed)
    directory = RunDirectory(Path(run.directory))
    incarnation = from_rank_0(lambda: _open(directory, component, recipe, config, written if writes_config else ""))
    _record(directory, component, layout.rank, run)
    progress = Progress()
    place = _place(component, layout, incarnation)
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
            yield Session(topology=layout, directory=directory, config_yaml=written, progress=progress)
            launch.shutdown()
        progress.enter_phase("done")
    except BaseException as error:
        progress.enter_phase(f"failed ({type(error).__name__})")
        raise
    finally:
        watch.stop()
        recording.close()


def _check_ranks(config: Any, component: str, num_ranks: int) -> None:
    """Raise ConfigError if as many ranks as `num_processes` names are not what was started. Its default, 1, names none."""
    server = next((one for one in config.servers() if one.name == component), None)
    named, prefix = (server.num_ranks, f"{component}.") if server else (config.num_processes, "")
    if named not in (1, num_ranks):
        started = f"{num_ranks} rank{' was' if num_ranks == 1 else 's were'} started"
        raise ConfigError(
            f"{prefix}num_processes={named}: {started}; start {named} (`aligner launch local` does, or torchrun, srun or mpiexec "
            f"with {named} processes), or set {prefix}num_processes={num_ranks}"
        )


def _place(component: str, layout: topology.Topology, incarnation: str) -> Place:
    """What this rank is called in health files and stacks."""
    return Place(
        component=component,
        rank=layout.rank,
        world_size=layout.world_size,
        host=os.environ.get("SLURMD_NODENAME") or machine.node(),  # every step of a Slurm job inherits the batch script's HOSTNAME
        incarnation=incarnation,
        attempt=os.environ.get("ALIGNER_ATTEMPT", ""),
        servers=SERVERS if component not in SERVERS else (),
    )


def _record(directory: RunDirectory, component: str, rank: int, run: RunConfig) -> None:
    """Begin to record calls of user code, and spans. Every rank calls it; raises ConfigError on all ranks if one cannot write."""
    refused: ConfigError | None = None
    try:
        user_code.record_in(directory.calls(component, rank))
        if run.trace_mib:
            recording.record_in(directory.trace / f"{component}.{rank}.jsonl", rank=rank, most_bytes=round(run.trace_mib * MIB))
    except OSError as error:
        refused = ConfigError(f"run.directory={directory.path}: rank {rank}: {describe_os_error(error, directory)}")
    raise_everywhere(refused)


def _open(directory: RunDirectory, component: str, recipe: str, config: Any, config_yaml: str) -> str:
    """Write the run directory's configuration; returns a name for this start. Raises ConfigError for one of another experiment."""
    try:
        directory.create()
        clear_last_report(directory.stacks, component)
        if config_yaml:
            if changes := check_changes(directory, type(config), config_yaml, allowed=config.run.allow_changes):
                print(changes, flush=True)
            directory.config.write_text(config_yaml)
            matmul = {key: model.float32_matmul.value for key, model in config.readers().items()}
            directory.record(float32_matmul=matmul, **({"recipe": recipe} if recipe else {}))
    except OSError as error:
        raise ConfigError(f"run.directory={directory.path}: {describe_os_error(error, directory)}") from error
    return uuid.uuid4().hex


@contextmanager
def announced(session: Session, name: str, *, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> Iterator[Publication | None]:
    """Announce that this component is loading. Gives rank 0 the publication that will announce it ready, other ranks None. Collective.

    Raises on every rank: ServerError if a component of this name and attempt already runs, ConfigError if it cannot register.
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
