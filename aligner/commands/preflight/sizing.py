"""The ranks' memory and GPUs, the plan against that memory, and the checkpoints against the free space."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.commands.preflight.tokenizers import tokenizer_of
from aligner.commands.programs import placement_of, programs, share_out
from aligner.errors import ConfigError
from aligner.loop.loop import NEWEST_BY_TIME
from aligner.models.config import Dtype
from aligner.parallel import platform
from aligner.planner.config import Device
from aligner.run.session import see_own_gpus
from aligner.run.settings import JobRun

GIB = 2**30
LEAST_FREE = 0.9  # part of a GPU's memory that a run needs to find free: less means that somebody else computes there
LEAST_SHARED_GIB = 1.0  # of /dev/shm: NCCL and Triton exchange data there
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One rank's hardware: its GPU, or the node's processor; sizes in bytes, 0 without a GPU."""

    gpus: int  # visible to the rank
    gpu: str  # name of the rank's own
    gpu_bytes: int
    gpu_free_bytes: int
    host_bytes: int  # what the processes of the node may use
    shared_bytes: int  # of /dev/shm
    own: str = ""  # what no other GPU of the node is called
    node_gpus: int = 0  # visible before its engine's replica was given its own


def _observe(context: Context) -> Machine:
    local_rank = context.allocation.world.local_rank
    node_gpus = len(platform.visible_devices())
    if context.job is not None:
        see_own_gpus(context.job, local_rank)  # as the job's own ranks will
    has_gpu = torch.cuda.is_available()
    own = platform.claim_device(local_rank, ranks_per_gpu=context.job.run.ranks_per_gpu if context.job is not None else 1)
    free, total = torch.cuda.mem_get_info() if has_gpu else (0, 0)
    return Machine(
        gpus=torch.cuda.device_count() if has_gpu else 0,
        gpu=torch.cuda.get_device_name() if has_gpu else "",
        gpu_bytes=total,
        gpu_free_bytes=free,
        host_bytes=host_bytes(),
        shared_bytes=_size(Path("/dev/shm")),
        own=own,
        node_gpus=node_gpus,
    )


def host_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """The machine's memory, or the scheduler's limit for this job."""
    total = psutil.virtual_memory().total
    for path in map(Path, limits):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _size(path: Path) -> int:
    if not path.is_dir():
        return 0
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def judge(context: Context, seen: Mapping[int, Machine]) -> Finding:
    """Fatal: no GPU where the config is for GPUs, more ranks than GPUs, two on one, several kinds of GPU. Warning: memory held by others.

    Raises ConfigError where the machine has too few for all components of a run that is not a Slurm job.
    """
    allocation, first = context.allocation, seen[0]
    wants_gpus = context.config.cluster.device == Device.gpu
    without = [rank for rank, machine in seen.items() if not machine.gpus]
    figures = {"host_gib": min(machine.host_bytes for machine in seen.values()) / GIB}
    if without and (wants_gpus or len(without) < len(seen)):
        text = f"{who(allocation, without)}: no GPU is visible to torch"
        return Finding(
            level=Level.fatal, found=text, advice="--gres=gpu:N or --gpus-per-node; in a container: --nv, or NVIDIA's hook; nvidia-smi"
        )
    if without:
        return _judge_host(context, seen, f"no GPU, {figures['host_gib']:.1f} GiB of host memory a node", figures)
    figures |= {"gpu_gib": min(machine.gpu_bytes for machine in seen.values()) / GIB, "node_gpus": float(first.node_gpus)}
    if "SLURM_JOB_ID" not in os.environ and len(set(allocation.nodes)) == 1 and first.node_gpus:  # as `aligner launch local` would
        found = programs(context.name, context.config, context.overrides)
        share_out(found, placement_of(context.config), first.node_gpus)
    if same := _on_same_gpu(context, seen):
        advice = "as many tasks per node as it has GPUs; run.ranks_per_gpu lets ranks share one"
        return Finding(level=Level.fatal, found=same, advice=advice, figures=figures)
    crowded = [rank for rank, machine in seen.items() if allocation.nodes.count(allocation.nodes[rank]) > machine.gpus > 1]
    if crowded:
        ranks_there = allocation.nodes.count(allocation.nodes[crowded[0]])
        text = f"{who(allocation, crowded)}: {seen[crowded[0]].gpus} GPUs for {ranks_there} ranks of the node"
        return Finding(level=Level.fatal, found=text, advice="as many tasks per node as it has GPUs", figures=figures)
    if others := [rank for rank, machine in seen.items() if machine.gpu != first.gpu]:
        text = f"{who(allocation, others)}: {seen[others[0]].gpu} and not {first.gpu}"
        return Finding(level=Level.fatal, found=text, advice="ask for nodes of one kind: --constraint, --partition", figures=figures)
    found = f"{first.gpu}, {figures['gpu_gib']:.1f} GiB each"
    if held := [rank for rank, machine in seen.items() if machine.gpu_free_bytes < LEAST_FREE * machine.gpu_bytes]:
        least = min(seen[rank].gpu_free_bytes for rank in held) / GIB
        text = f"{found}; {who(allocation, held)}: only {least:.1f} GiB free"
        return Finding(level=Level.warning, found=text, advice="nvidia-smi there shows whose processes hold the rest", figures=figures)
    return _judge_host(context, seen, found, figures)


def _on_same_gpu(context: Context, seen: Mapping[int, Machine]) -> str:
    """The ranks that came to one GPU; empty if there are none."""
    allocation = context.allocation
    places: dict[tuple[str, str], list[int]] = {}
    for rank, machine in seen.items():
        if machine.own:
            places.setdefault((allocation.nodes[rank], machine.own), []).append(rank)
    return "; ".join(f"{who(allocation, ranks)}: on the same GPU ({own})" for (_, own), ranks in places.items() if len(ranks) > 1)


def _judge_host(context: Context, seen: Mapping[int, Machine], found: str, figures: Mapping[str, float]) -> Finding:
    small = [rank for rank, machine in seen.items() if machine.shared_bytes < LEAST_SHARED_GIB * GIB]
    if small:
        text = f"{found}; {who(context.allocation, small)}: /dev/shm has {seen[small[0]].shared_bytes / GIB:.2f} GiB"
        return Finding(level=Level.warning, found=text, advice="give the container more: --shm-size, --ipc=host", figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


DEVICES = Item("devices", Where.every_rank, _observe, judge, timeout_seconds=120.0, needs=("config",))


TIGHT = 0.92  # part of the memory above which a plan is called tight
ADAM_BYTES = 12  # of a parameter in a checkpoint: the float32 weight and two moments
_LAUNCHER = re.compile(r"(SLURM|PMI|PMIX|OMPI|TORCHELASTIC)_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The result of `aligner plan` for these machines; sizes in bytes."""

    problems: list[str] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)  # component -> fullest moment of a rank
    limit: int = 0
    checkpoint: dict[str, int] = field(default_factory=dict)  # component that trains -> one checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Free bytes where the run directory is."""

    free: int
    total: int


def _observe_plan(context: Context) -> Planned:
    overrides = [*real_cluster(context), *real_vocabularies(context.config)]
    return run_plan(context, overrides, timeout_seconds=max(1.0, context.allocation.deadline - time.monotonic() - 2.0))


def real_cluster(context: Context) -> list[str]:
    """Overrides that replace the cluster file's memory by that found here."""
    figures = context.findings["devices"].figures if "devices" in context.findings else {}
    if "host_gib" not in figures:
        return []
    allocation = context.allocation
    per_node = max(allocation.nodes.count(node) for node in set(allocation.nodes))
    device = Device.gpu if "gpu_gib" in figures else Device.cpu
    memory = figures["gpu_gib"] if device is Device.gpu else figures["host_gib"] / per_node
    gpus_per_node = max(per_node, int(figures.get("node_gpus", 0.0)))  # started with one rank, say
    cluster = {"device": device.value, "gpus_per_node": gpus_per_node, "host_memory_gib": figures["host_gib"], "gpu_memory_gib": memory}
    return [f"cluster.{name}={value}" for name, value in cluster.items()]


def real_vocabularies(config: JobRun) -> list[str]:
    """Overrides for models without weights, which take the size of their vocabulary from the tokenizer; a plan reads no tokenizer."""
    found = []
    for model in config.models():
        is_own = model.key == "model" or model.config is not config.model
        if is_own and not model.config.path and not model.config.architecture.vocab_size:
            found.append(f"{model.key}.architecture.vocab_size={tokenizer_of(model).vocab_size}")
    return found


def run_plan(context: Context, overrides: Sequence[str], *, timeout_seconds: float) -> Planned:
    """Plan in a separate process, which can have the required fake world. Raises ConfigError with its output."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER.match(name)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "aligner.cli", "plan", context.name, *context.overrides, *overrides, "--json", str(result)]
        try:
            # Without a GPU: planning computes nothing, and must not take memory from the ranks.
            done = subprocess.run(
                command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"aligner plan did not finish within {timeout_seconds:.0f} s") from error
        if not result.exists():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise ConfigError(f"aligner plan ended with {done.returncode}: {said[-1] if said else 'nothing was printed'}")
        return read_plan(json.loads(result.read_text()), context.config)


def read_plan(tree: Mapping[str, Any], config: JobRun) -> Planned:
    """The preflight's part of a plan's JSON. Pure."""
    components: Mapping[str, Mapping[str, Any]] = tree["components"]
    trained = {name: one for name, one in components.items() if one["micro_batches"] is not None}
    return Planned(
        problems=list(tree["problems"]),
        peak={name: one["peak_bytes"] for name, one in components.items()},
        limit=next(iter(components.values()))["limit_bytes"],
        checkpoint={name: one["parameters"] * (_weight_bytes(one["dtype"]) + ADAM_BYTES) for name, one in trained.items()},
    )


def _weight_bytes(dtype: str) -> int:
    return Dtype(dtype).num_bytes


def judge_plan(context: Context, seen: Mapping[int, Planned]) -> Finding:
    """Fatal if a component does not fit these machines."""
    plan = seen[0]
    figures = {f"{name}_peak_bytes": float(size) for name, size in plan.peak.items()}
    figures |= {"limit_bytes": float(plan.limit), "checkpoint_bytes": float(sum(plan.checkpoint.values()))}
    found = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.peak.items()) + f" of {plan.limit / GIB:.1f} GiB a rank"
    if plan.problems:
        advice = "aligner plan says more, --search finds layouts that fit"
        data = context.config.data
        if unset := [f"data.{name}" for name in ("max_length", "max_prompt_length") if getattr(data, name, None) == 0]:
            advice += f"; sequences are counted as long as the model's context: set {' and '.join(unset)} to what the data need"
        return Finding(level=Level.fatal, found="\n".join(plan.problems), advice=advice, figures=figures)
    wanted = context.config.cluster
    notes = []
    if max(plan.peak.values()) > TIGHT * plan.limit:
        notes.append("this is tight: the plan is within 20 % of what was measured")
    if "gpu_gib" in (devices := context.findings["devices"].figures if "devices" in context.findings else {}):
        if wanted.device != Device.gpu or devices["gpu_gib"] < 0.95 * wanted.gpu_memory_gib:
            notes.append(
                f"cluster={wanted.device.value} with {wanted.gpu_memory_gib:g} GiB was configured, {devices['gpu_gib']:.1f} GiB are here"
            )
    if notes:
        return Finding(level=Level.warning, found=found, advice="; ".join(notes), figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


def _observe_space(context: Context) -> Space:
    path = Path(context.config.run.directory).expanduser().absolute()
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return Space(free=found.f_bavail * found.f_frsize, total=found.f_blocks * found.f_frsize)


def judge_space(context: Context, seen: Mapping[int, Space]) -> Finding:
    """Fatal below two checkpoints: the newest and the one that replaces it. Warning below all that the run will keep."""
    space, config = seen[0], context.config
    one = context.findings["plan"].figures["checkpoint_bytes"] if "plan" in context.findings else 0.0
    saves = max(1, config.loop.max_steps // config.loop.save_every) if config.loop.save_every else 1
    by_time = NEWEST_BY_TIME if config.loop.save_minutes else 0  # beside them, of a run that takes so long
    kept = min(saves + by_time, config.checkpoint.keep + 1) if config.checkpoint.keep else saves + by_time
    needed, everything = one * min(2, saves), one * max(kept, min(2, saves))
    figures = {"free_bytes": float(space.free), "checkpoint_bytes": one, "needed_bytes": needed, "all_bytes": everything}
    found = f"{space.free / GIB:.1f} GiB free; a checkpoint is {one / GIB:.2f} GiB, {kept} of them {everything / GIB:.1f} GiB"
    if space.free < needed:
        advice = f"free {(needed - space.free) / GIB:.1f} GiB, or give another run.directory (a quota may leave you even less)"
        return Finding(level=Level.fatal, found=found, advice=advice, figures=figures)
    if space.free < everything:
        advice = "set checkpoint.keep, save less often (loop.save_every), or free some"
        return Finding(level=Level.warning, found=found, advice=advice, figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


PLAN = Item("plan", Where.first_rank, _observe_plan, judge_plan, timeout_seconds=300.0, needs=("devices", "tokenizer"))
SPACE = Item("space", Where.first_rank, _observe_space, judge_space, timeout_seconds=30.0, needs=("filesystem", "plan"))
