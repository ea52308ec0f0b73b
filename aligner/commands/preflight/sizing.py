"""The ranks' memory and GPUs, the plan against that memory, and the checkpoints against the free space."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from aligner.commands.preflight.framework import Context, Finding, Where, agree, fatal, item, ok, warning, who
from aligner.commands.preflight.models import tokenizer_of
from aligner.commands.programs import programs, share_out
from aligner.errors import ConfigError
from aligner.loop.loop import NEWEST_BY_TIME
from aligner.models.checkpoint.files import GIB, free_bytes
from aligner.models.config import Dtype
from aligner.parallel import platform
from aligner.planner.config import Device
from aligner.run.session import see_own_gpus
from aligner.run.settings import JobRun

LEAST_FREE = 0.9  # part of a GPU's memory that should be free: less means that another job is using it
LEAST_SHARED_GIB = 1.0  # of /dev/shm: NCCL and Triton exchange data there
TIGHT = 0.92  # part of the memory above which a plan is called tight
ADAM_BYTES = 12  # of a parameter in a checkpoint: the float32 weight and two moments
_LAUNCHER = re.compile(r"(SLURM|PMI|PMIX|OMPI|TORCHELASTIC)_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")
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
    own: str = ""  # identifier of the GPU, unique on the node
    node_gpus: int = 0  # visible before the rank selected its own


@item("devices", Where.every_rank, seconds=120.0, needs=("config",))
def devices(context: Context) -> Machine:
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
        shared_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
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


@devices.judged
def judge_devices(context: Context, seen: Mapping[int, Machine]) -> Finding:
    """Fatal: no GPU although the config is for GPUs, more ranks than GPUs, two on one, several kinds of GPU, too few for all components of
    a run that is not a Slurm job. Warning: memory is in use."""
    allocation, first = context.allocation, seen[0]
    without = [rank for rank, machine in seen.items() if not machine.gpus]
    figures = {"host_gib": min(machine.host_bytes for machine in seen.values()) / GIB}
    if without and (context.config.cluster.device == Device.gpu or len(without) < len(seen)):
        advice = "--gres=gpu:N or --gpus-per-node; in a container: --nv, or NVIDIA's hook; nvidia-smi"
        return fatal(f"{who(allocation, without)}: no GPU is visible to torch", advice)
    if without:
        return _judge_host(context, seen, f"no GPU, {figures['host_gib']:.1f} GiB of host memory a node", figures)
    figures |= {"gpu_gib": min(machine.gpu_bytes for machine in seen.values()) / GIB, "node_gpus": float(first.node_gpus)}
    if "SLURM_JOB_ID" not in os.environ and len(set(allocation.nodes)) == 1 and first.node_gpus:  # as `aligner launch local` would
        found = programs(context.name, context.config, context.overrides)
        share_out(found, context.config.server_placement, first.node_gpus)
    if same := _on_same_gpu(context, seen):
        return fatal(same, "as many tasks per node as it has GPUs; run.ranks_per_gpu lets ranks share one", figures)
    crowded = [rank for rank, machine in seen.items() if allocation.nodes.count(allocation.nodes[rank]) > machine.gpus > 1]
    if crowded:
        ranks_there = allocation.nodes.count(allocation.nodes[crowded[0]])
        text = f"{who(allocation, crowded)}: {seen[crowded[0]].gpus} GPUs for {ranks_there} ranks of the node"
        return fatal(text, "as many tasks per node as it has GPUs", figures)
    advice = "request nodes of one kind: --constraint, --partition"
    if different := agree(
        context, seen, lambda theirs, ours: f": {theirs.gpu} and not {ours.gpu}", advice, of=lambda machine: machine.gpu, figures=figures
    ):
        return different
    text = f"{first.gpu}, {figures['gpu_gib']:.1f} GiB each"
    if held := [rank for rank, machine in seen.items() if machine.gpu_free_bytes < LEAST_FREE * machine.gpu_bytes]:
        least = min(seen[rank].gpu_free_bytes for rank in held) / GIB
        advice = "nvidia-smi there shows whose processes hold the rest"
        return warning(f"{text}; {who(allocation, held)}: only {least:.1f} GiB free", advice, figures)
    return _judge_host(context, seen, text, figures)


def _on_same_gpu(context: Context, seen: Mapping[int, Machine]) -> str:
    """The ranks that share a GPU; empty if none do."""
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
        return warning(text, "give the container more: --shm-size, --ipc=host", figures)
    return ok(found, figures=figures)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The result of `aligner plan` for these machines; sizes in bytes."""

    problems: list[str] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)  # component -> fullest moment of a rank
    limit: int = 0
    checkpoint: dict[str, int] = field(default_factory=dict)  # component that trains -> one checkpoint


@item("plan", Where.first_rank, seconds=300.0, needs=("devices", "tokenizer"))
def plan(context: Context) -> Planned:
    overrides = [*real_cluster(context), *real_vocabularies(context.config)]
    return run_plan(context, overrides, timeout_seconds=max(1.0, context.allocation.deadline - time.monotonic() - 2.0))


def real_cluster(context: Context) -> list[str]:
    """Overrides that replace the cluster file's memory by the memory found here."""
    figures = _figures(context, "devices")
    if "host_gib" not in figures:
        return []
    per_node = max(Counter(context.allocation.nodes).values())
    device = Device.gpu if "gpu_gib" in figures else Device.cpu
    memory = figures["gpu_gib"] if device is Device.gpu else figures["host_gib"] / per_node
    gpus_per_node = max(per_node, int(figures.get("node_gpus", 0.0)))  # more than ranks if started with one rank
    cluster = {"device": device.value, "gpus_per_node": gpus_per_node, "host_memory_gib": figures["host_gib"], "gpu_memory_gib": memory}
    return [f"cluster.{name}={value}" for name, value in cluster.items()]


def _figures(context: Context, item: str) -> Mapping[str, float]:
    """The figures of an earlier item; none if it was not chosen."""
    return context.findings[item].figures if item in context.findings else {}


def real_vocabularies(config: JobRun) -> list[str]:
    """Overrides for models without weights: the size of their vocabulary is the tokenizer's, and a plan reads no tokenizer."""
    found = []
    for model in config.models():
        is_own = model.key == "model" or model.config is not config.model
        if is_own and not model.config.path and not model.config.architecture.vocab_size:
            found.append(f"{model.key}.architecture.vocab_size={tokenizer_of(model).vocab_size}")
    return found


def run_plan(context: Context, overrides: Sequence[str], *, timeout_seconds: float) -> Planned:
    """Plan in a separate process, which can have the required fake world. Raises ConfigError with the process's last line."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER.match(name)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "aligner.cli", "plan", context.name, *context.overrides, *overrides, "--json", str(result)]
        try:
            # Without a GPU: planning computes nothing, and must not use the ranks' memory.
            done = subprocess.run(
                command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"aligner plan did not finish within {timeout_seconds:.0f} s") from error
        if not result.exists():
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise ConfigError(f"aligner plan ended with {done.returncode}: {lines[-1] if lines else 'nothing was printed'}")
        return read_plan(json.loads(result.read_text()), context.config)


def read_plan(tree: Mapping[str, Any], config: JobRun) -> Planned:
    """The preflight's part of a plan's JSON. Pure."""
    components: Mapping[str, Mapping[str, Any]] = tree["components"]
    trained = {name: one for name, one in components.items() if one["micro_batches"] is not None}
    return Planned(
        problems=list(tree["problems"]),
        peak={name: one["peak_bytes"] for name, one in components.items()},
        limit=next(iter(components.values()))["limit_bytes"],
        checkpoint={name: one["parameters"] * (Dtype(one["dtype"]).num_bytes + ADAM_BYTES) for name, one in trained.items()},
    )


@plan.judged
def judge_plan(context: Context, seen: Mapping[int, Planned]) -> Finding:
    """Fatal if a component does not fit these machines."""
    plan, wanted = seen[0], context.config.cluster
    figures = {f"{name}_peak_bytes": float(size) for name, size in plan.peak.items()}
    figures |= {"limit_bytes": float(plan.limit), "checkpoint_bytes": float(sum(plan.checkpoint.values()))}
    if plan.problems:
        advice = "aligner plan has the details, --search finds layouts that fit"
        data = context.config.data
        if unset := [f"data.{name}" for name in ("max_length", "max_prompt_length") if getattr(data, name, None) == 0]:
            advice += f"; sequences count with the model's whole context: set {' and '.join(unset)} to what the data need"
        return fatal("\n".join(plan.problems), advice, figures)
    notes = []
    if max(plan.peak.values()) > TIGHT * plan.limit:
        notes.append("this is tight: plans are within 20 % of measurements")
    if "gpu_gib" in (devices := _figures(context, "devices")):
        if wanted.device != Device.gpu or devices["gpu_gib"] < 0.95 * wanted.gpu_memory_gib:
            notes.append(
                f"cluster={wanted.device.value} with {wanted.gpu_memory_gib:g} GiB is configured, {devices['gpu_gib']:.1f} GiB are here"
            )
    found = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.peak.items()) + f" of {plan.limit / GIB:.1f} GiB a rank"
    return warning(found, "; ".join(notes), figures) if notes else ok(found, figures=figures)


@item("space", Where.first_rank, seconds=30.0, needs=("filesystem", "plan"))
def space(context: Context) -> int:
    """Free bytes of the run directory's file system."""
    return free_bytes(Path(context.config.run.directory).expanduser())


@space.judged
def judge_space(context: Context, seen: Mapping[int, int]) -> Finding:
    """Fatal below two checkpoints: the newest and the one that replaces it. Warning below all checkpoints that the run will keep."""
    free, config = seen[0], context.config
    one = _figures(context, "plan").get("checkpoint_bytes", 0.0)
    saves = max(1, config.loop.max_steps // config.loop.save_every) if config.loop.save_every else 1
    by_time = NEWEST_BY_TIME if config.loop.save_minutes else 0  # kept in addition
    kept = min(saves + by_time, config.checkpoint.keep + 1) if config.checkpoint.keep else saves + by_time
    needed, everything = one * min(2, saves), one * max(kept, min(2, saves))
    figures = {"free_bytes": float(free), "checkpoint_bytes": one, "needed_bytes": needed, "all_bytes": everything}
    found = f"{free / GIB:.1f} GiB free; a checkpoint is {one / GIB:.2f} GiB, {kept} of them {everything / GIB:.1f} GiB"
    if free < needed:
        advice = f"free {(needed - free) / GIB:.1f} GiB, or give another run.directory (a quota may leave you even less)"
        return fatal(found, advice, figures)
    if free < everything:
        return warning(found, "set checkpoint.keep, save less often (loop.save_every), or free some space", figures)
    return ok(found, figures=figures)
