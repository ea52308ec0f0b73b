"""Checks that all ranks came once, with the job's sizes and config, and the same software on each."""

from __future__ import annotations

import platform as interpreter
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from aligner.algorithms.registry import composed
from aligner.commands.preflight.framework import Context, Finding, Level, Where, agree, fatal, item, ok, warning, who
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.hub.names import name_of
from aligner.models.config import ModelConfig
from aligner.rollout.config import EngineKind
from aligner.rollout.tensorrt_llm.contract import graphs_lost
from aligner.run.from_hub import fetch_named
from aligner.run.session import prepare_environment
from aligner.run.settings import JobRun
from aligner.servers.components import SERVERS, in_section
from aligner.settings.compose import fingerprint, to_yaml
from aligner.version import __version__

PACKAGES = (
    *("megatron-core", "numpy", "transformers", "tokenizers", "safetensors", "nvidia-pytriton", "transformer-engine", "tensorrt-llm"),
    *("vllm", "mpi4py"),
)
ABSENT = "absent"


@item(
    "ranks", Where.every_rank, seconds=300.0, advice="look at those nodes (sinfo, the job's log), or exclude them from the job: --exclude"
)
def meet(context: Context) -> dict[str, Any]:
    """The number of ranks that this rank expects, and what started it."""
    allocation = context.allocation
    own = {"node": allocation.node, "world_size": allocation.size}
    if allocation.store.add(f"preflight/claims/{allocation.rank}", 1) > 1:
        raise LaunchError(
            f"two processes call themselves rank {allocation.rank} (one is on {allocation.node}): the launcher's variables are wrong"
        )
    places = allocation.exchange("place", own, what="a sign of life")
    if len(places) != allocation.size:
        raise LaunchError(f"rank {allocation.rank} on {allocation.node} expected {allocation.size} ranks, rank 0 {len(places)}")
    allocation.nodes = tuple(place["node"] for place in places)
    return {"world_size": allocation.size, "started_by": allocation.world.source.value}


@meet.judged
def judge_ranks(context: Context, seen: Mapping[int, dict[str, Any]]) -> Finding:
    size, per_node = context.allocation.size, Counter(context.allocation.nodes)
    if different := agree(
        context,
        seen,
        lambda theirs, ours: f" expected {theirs['world_size']} ranks, rank 0 {ours['world_size']}",
        advice="start all ranks with one srun, torchrun or mpiexec",
        of=lambda place: place["world_size"],
    ):
        return different
    found = f"{size} {'rank' if size == 1 else 'ranks'} on {len(per_node)} {'node' if len(per_node) == 1 else 'nodes'}"
    figures = {"ranks": float(size), "nodes": float(len(per_node))}
    if len(set(per_node.values())) > 1:
        uneven = ", ".join(f"{node}: {count}" for node, count in sorted(per_node.items(), key=lambda pair: pair[1])[:6])
        return warning(f"{found}, unevenly spread ({uneven})", "give every node the same number of ranks: --ntasks-per-node", figures)
    return ok(f"{found}, started by {seen[0]['started_by']}", figures=figures)


@item("config", Where.every_rank, seconds=120.0, needs=("ranks",))
def compose(context: Context) -> str:
    job = composed(context.name, context.overrides)
    job.check_complete()
    context.job = job
    return fingerprint(to_yaml(job))


@compose.judged
def judge_config(context: Context, seen: Mapping[int, str]) -> Finding:
    advice = "same checkout, arguments and environment variables on every node"
    if different := agree(context, seen, lambda theirs, ours: f": another config than rank 0 ({theirs} and not {ours})", advice):
        return different
    config = context.config
    finding = _judge_sizes(context.allocation.size, config, seen[0])
    notes = [_chosen_engine(config)] if finding.level is not Level.fatal else []
    notes += [" ".join(f"{name}={value}" for name, value in prepare_environment(config, config.parallel).items())]
    return replace(finding, found="; ".join(filter(None, [finding.found, *notes])))


def _chosen_engine(config: JobRun) -> str:
    """The choice of `rollout.engine=auto`, with the reason; what TensorRT-LLM loses with the run's settings; else empty."""
    rollout = config.sampler
    if rollout is not None and rollout.engine == EngineKind.tensorrt_llm:
        return graphs_lost(rollout.tensorrt_llm.cuda_graphs, offload=rollout.offload)
    if rollout is None or rollout.engine != EngineKind.auto:
        return ""
    from aligner.rollout.create import choose

    model = config.models()[0].config
    return str(choose(rollout, tp=rollout.tp or config.parallel.tp, batch_invariant=model.batch_invariant, own=_only_built_in(model)))


def _only_built_in(model: ModelConfig) -> str:
    from aligner.models.create import read_architecture  # Megatron-Core comes with it
    from aligner.rollout.create import only_built_in

    try:
        return only_built_in(read_architecture(model, vocab_size=0))
    except (AlignerError, OSError):  # another item reports problems of the model
        return ""


def _judge_sizes(size: int, config: JobRun, mark: str) -> Finding:
    """Whether the rank count matches a component of the config, or all together, and whether the layouts divide."""
    main, wanted = "actor" if config.traits().role == "actor" else "trainer", {}
    layouts = [(main, config.num_processes, config.parallel), *((one.name, one.num_ranks, one.parallel) for one in config.servers())]
    for name, count, layout in layouts:
        wanted[name] = count
        try:
            with in_section(name if name in SERVERS else ""):
                layout.check_world(count)
        except ConfigError as error:
            return fatal(f"{name}: {error}", f"change {name}'s parallel sizes, or its num_processes")
    listed = ", ".join(f"{name} {count}" for name, count in wanted.items())
    figures = {f"wanted_{name}": float(count) for name, count in wanted.items()}
    if size in (*wanted.values(), sum(wanted.values())):
        return ok(f"{mark} on every rank; it needs {listed}", figures=figures)
    advice = "start the preflight on the nodes of one component, or of all; or set num_processes to the job's number of ranks"
    return warning(f"it needs {listed}; {size} came", advice, figures)


@item(
    "hub",
    Where.every_rank,  # each has a config of its own; one of a node downloads
    seconds=4000.0,
    needs=("config",),
    advice="download it on a machine with a network (hf download), to a cache that all nodes see: HF_HOME",
)
def fetch(context: Context) -> dict[str, str]:
    def report(line: str) -> None:
        print(f"preflight: {line}", file=sys.stderr, flush=True)

    return {key: str(name_of(directory)) for key, directory in fetch_named(context.config, say=report).items()}


@fetch.judged
def judge_hub(context: Context, seen: Mapping[int, dict[str, str]]) -> Finding:
    """Fatal if a rank has another commit than rank 0."""
    advice = "name the commit: ORG/NAME@COMMIT"
    listed = {rank: ", ".join(f"{key}: {value}" for key, value in named.items()) for rank, named in seen.items()}
    different = agree(context, listed, lambda theirs, ours: f": {theirs}; rank 0: {ours}", advice)
    return different or ok(listed[0] or "no setting names a model or data set of the Hub")


def own_versions() -> dict[str, str]:
    """The versions in this process; packages are not imported for it."""
    found = {"python": interpreter.python_version(), "aligner": __version__, "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ABSENT
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
    return found


@item("versions", Where.every_rank, seconds=60.0, needs=("ranks",))
def versions(_: Context) -> dict[str, str]:
    return own_versions()


@versions.judged
def judge_versions(context: Context, seen: Mapping[int, dict[str, str]]) -> Finding:
    """Fatal if a rank differs from rank 0 in anything, or has no Megatron-Core."""
    ours = seen[0]
    differing: dict[str, list[int]] = {}
    for rank, theirs in seen.items():
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name, ABSENT) != ours.get(name, ABSENT):
                differing.setdefault(f"{name} is {theirs.get(name, ABSENT)} and not {ours.get(name, ABSENT)}", []).append(rank)
    if differing:
        text = "; ".join(f"{who(context.allocation, ranks)}: {what}" for what, ranks in differing.items())
        return fatal(text, "one container or environment for all nodes, on a file system that all of them see")
    if ours["megatron-core"] == ABSENT:
        return fatal("megatron-core is not installed", "pip install aligner, or use the container")
    left_out = ("tokenizers", "safetensors")
    return ok(", ".join(f"{name} {number}" for name, number in ours.items() if number != ABSENT and name not in left_out))
