"""Checks that all ranks came once, with the job's sizes and config, and the same software on each."""

from __future__ import annotations

import platform as interpreter
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from aligner.algorithms.registry import composed
from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.hub.names import name_of
from aligner.models.config import ModelConfig
from aligner.rollout.config import EngineKind
from aligner.rollout.tensorrt_llm.contract import graphs_lost
from aligner.run.from_hub import fetch_named
from aligner.run.session import prepare_environment
from aligner.run.settings import JobRun
from aligner.servers.components import SERVERS, in_section
from aligner.settings.compose import fingerprint
from aligner.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank and where it is."""

    rank: int
    node: str
    world_size: int
    started_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """The config as one rank composed it."""

    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """What the settings name on the Hugging Face Hub, with the commits that this rank has, by setting."""

    names: dict[str, str] = field(default_factory=dict)


def _meet(context: Context) -> Place:
    allocation = context.allocation
    own = {"node": allocation.node, "world_size": allocation.size}
    if allocation.store.add(f"preflight/claims/{allocation.rank}", 1) > 1:
        raise LaunchError(
            f"two processes call themselves rank {allocation.rank} (one is on {allocation.node}): the launcher's variables are wrong"
        )
    places = allocation.exchange("place", own, what="a sign of life")
    if len(places) != allocation.size:
        raise LaunchError(f"rank {allocation.rank} on {allocation.node} was told of {allocation.size} ranks, rank 0 of {len(places)}")
    allocation.nodes = tuple(place["node"] for place in places)
    return Place(rank=allocation.rank, node=allocation.node, world_size=allocation.size, started_by=allocation.world.source.value)


def _judge_ranks(context: Context, seen: Mapping[int, Place]) -> Finding:
    allocation = context.allocation
    if strays := [rank for rank, place in seen.items() if place.world_size != allocation.size]:
        told = f"{'was' if len(strays) == 1 else 'were'} told of {seen[strays[0]].world_size} ranks"
        text = f"{who(allocation, strays)} {told}, rank 0 of {allocation.size}"
        return Finding(level=Level.fatal, found=text, advice="start all ranks with one srun, torchrun or mpiexec")
    per_node = Counter(allocation.nodes)
    sizes = sorted(set(per_node.values()))
    found = (
        f"{allocation.size} {'rank' if allocation.size == 1 else 'ranks'} on {len(per_node)} {'node' if len(per_node) == 1 else 'nodes'}"
    )
    figures = {"ranks": float(allocation.size), "nodes": float(len(per_node))}
    if len(sizes) > 1:
        uneven = ", ".join(f"{node}: {count}" for node, count in sorted(per_node.items(), key=lambda pair: pair[1])[:6])
        text = f"{found}, unevenly spread ({uneven})"
        advice = "give every node the same number of ranks: --ntasks-per-node"
        return Finding(level=Level.warning, found=text, advice=advice, figures=figures)
    return Finding(level=Level.ok, found=f"{found}, started by {seen[0].started_by}", figures=figures)


def _compose(context: Context) -> Composed:
    job = composed(context.name, context.overrides)
    job.check_complete()
    context.job = job
    return Composed(fingerprint=fingerprint(job))


def _bring(context: Context) -> Brought:
    def say(line: str) -> None:
        print(f"preflight: {line}", file=sys.stderr, flush=True)

    return Brought(names={key: str(name_of(directory)) for key, directory in fetch_named(context.config, say=say).items()})


def _judge_hub(context: Context, seen: Mapping[int, Brought]) -> Finding:
    """Fatal if a rank has another commit than rank 0."""
    if others := [rank for rank, one in seen.items() if one.names != seen[0].names]:
        text = f"{who(context.allocation, others)}: {_listed(seen[others[0]].names)}; rank 0: {_listed(seen[0].names)}"
        return Finding(level=Level.fatal, found=text, advice="name the commit: ORG/NAME@COMMIT")
    return Finding(level=Level.ok, found=_listed(seen[0].names) or "no setting names anything there")


def _listed(named: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in named.items())


def _judge_config(context: Context, seen: Mapping[int, Composed]) -> Finding:
    allocation = context.allocation
    if others := [rank for rank, one in seen.items() if one.fingerprint != seen[0].fingerprint]:
        text = f"{who(allocation, others)}: another config than rank 0 ({seen[others[0]].fingerprint} and not {seen[0].fingerprint})"
        return Finding(level=Level.fatal, found=text, advice="same checkout, arguments and environment variables on every node")
    finding = _judge_sizes(allocation.size, context.config, seen[0].fingerprint)
    if finding.level is not Level.fatal and (engine := _chosen_engine(context.config)):
        finding = replace(finding, found=f"{finding.found}; {engine}")
    if variables := prepare_environment(context.config, context.config.parallel):
        finding = replace(finding, found=f"{finding.found}; {' '.join(f'{name}={value}' for name, value in variables.items())}")
    return finding


def _chosen_engine(config: JobRun) -> str:
    """What `rollout.engine=auto` takes here, and why not another; of a named engine what it costs with the run's settings, or nothing."""
    rollout = config.sampler
    if rollout is not None and rollout.engine == EngineKind.tensorrt_llm:
        return graphs_lost(rollout.tensorrt_llm.cuda_graphs, offload=rollout.offload)
    if rollout is None or rollout.engine != EngineKind.auto:
        return ""
    from aligner.rollout.engine.choice import choose

    model = config.models()[0].config
    tp, delta_nets = rollout.tp or config.parallel.tp, _has_delta_nets(model)
    return str(choose(rollout, tp=tp, batch_invariant=model.batch_invariant, delta_nets=delta_nets))


def _has_delta_nets(model: ModelConfig) -> bool:
    from aligner.models.create import read_architecture  # Megatron-Core comes with it

    try:
        return bool(read_architecture(model, vocab_size=0).linear_attention_layers)
    except (AlignerError, OSError):  # what is wrong with the model another item says
        return False


def wanted_ranks(config: JobRun) -> dict[str, int]:
    """The ranks of every component that the run starts, the training one first."""
    return {_main(config): config.num_processes} | {server.name: server.num_ranks for server in config.servers()}


def _main(config: JobRun) -> str:
    return "actor" if config.traits().role == "actor" else "trainer"


def _judge_sizes(size: int, config: JobRun, mark: str) -> Finding:
    """Whether the rank count matches a component of the config, or all together, and whether the layouts divide."""
    wanted = wanted_ranks(config)
    layouts = {_main(config): config.parallel} | {server.name: server.parallel for server in config.servers()}
    for name, count in wanted.items():
        try:
            with in_section(name if name in SERVERS else ""):
                layouts[name].check_world(count)
        except ConfigError as error:
            advice = f"mend {name}'s parallel sizes, or its num_processes"
            return Finding(level=Level.fatal, found=f"{name}: {error}", advice=advice)
    listed = ", ".join(f"{name} {count}" for name, count in wanted.items())
    figures = {f"wanted_{name}": float(count) for name, count in wanted.items()}
    if size in (*wanted.values(), sum(wanted.values())):
        return Finding(level=Level.ok, found=f"{mark} on every rank; it wants {listed}", figures=figures)
    text = f"it wants {listed}; {size} came"
    advice = "start the preflight on the nodes of a component, or of all; or set num_processes to what the job will have"
    return Finding(level=Level.warning, found=text, advice=advice, figures=figures)


RANKS = Item(
    "ranks",
    Where.every_rank,
    _meet,
    _judge_ranks,
    timeout_seconds=300.0,
    advice="look at those nodes (sinfo, the job's log), or leave them out: --exclude",
)
CONFIG = Item("config", Where.every_rank, _compose, _judge_config, timeout_seconds=120.0, needs=("ranks",))


PACKAGES = (
    "megatron-core",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "nvidia-pytriton",
    "transformer-engine",
    "tensorrt-llm",
    "vllm",
    "mpi4py",
)
ABSENT = "absent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Name -> version, as one rank sees it."""

    of: dict[str, str] = field(default_factory=dict)


def own_versions() -> dict[str, str]:
    """The versions in this process; packages are asked for theirs without being imported."""
    found = {"python": interpreter.python_version(), "aligner": __version__, "torch": torch.__version__}
    found |= {name: _installed(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
    return found


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def _observe(_: Context) -> Versions:
    return Versions(of=own_versions())


def judge(context: Context, seen: Mapping[int, Versions]) -> Finding:
    """Fatal if a rank differs from rank 0 in anything, or has no Megatron-Core."""
    ours = seen[0].of
    differing: dict[str, list[int]] = {}
    for rank, versions in seen.items():
        for name in sorted(ours.keys() | versions.of.keys()):
            theirs = versions.of.get(name, ABSENT)
            if theirs != ours.get(name, ABSENT):
                differing.setdefault(f"{name} is {theirs} and not {ours.get(name, ABSENT)}", []).append(rank)
    if differing:
        text = "; ".join(f"{who(context.allocation, ranks)}: {what}" for what, ranks in differing.items())
        return Finding(
            level=Level.fatal, found=text, advice="one container or environment for all nodes, on a file system that all of them see"
        )
    if ours["megatron-core"] == ABSENT:
        return Finding(level=Level.fatal, found="megatron-core is not installed", advice="pip install aligner, or use the container")
    shown = ", ".join(f"{name} {number}" for name, number in ours.items() if number != ABSENT and name not in ("tokenizers", "safetensors"))
    return Finding(level=Level.ok, found=shown)


HUB = Item(
    "hub",
    Where.every_rank,  # each has a config of its own; one of a node downloads
    _bring,
    _judge_hub,
    timeout_seconds=4000.0,
    needs=("config",),
    advice="download it where there is a network (hf download), to a cache that all nodes see: HF_HOME",
)
VERSIONS = Item("versions", Where.every_rank, _observe, judge, timeout_seconds=60.0, needs=("ranks",))
