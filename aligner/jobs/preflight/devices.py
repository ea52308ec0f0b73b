"""The memory and the GPUs that the ranks have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from aligner.jobs.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.loop.session import see_own_gpus
from aligner.parallel import platform
from aligner.planner.config import Device

GIB = 2**30
LEAST_FREE = 0.9  # part of a GPU's memory that a run needs to find free: less means that somebody else computes there
LEAST_SHARED_GIB = 1.0  # of /dev/shm: NCCL and Triton exchange data there
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What one rank finds: its GPU, or the node's processor; sizes in bytes, 0 where there is no GPU."""

    gpus: int  # visible to the rank
    gpu: str  # name of the rank's own
    gpu_bytes: int
    gpu_free_bytes: int
    host_bytes: int  # what the processes of the node may use
    shared_bytes: int  # of /dev/shm


def _observe(context: Context) -> Machine:
    local_rank = context.allocation.world.local_rank
    if context.job is not None:
        see_own_gpus(context.job, local_rank)  # as the job's own ranks will
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        platform.select_device(local_rank)
    free, total = torch.cuda.mem_get_info() if has_gpu else (0, 0)
    return Machine(
        gpus=torch.cuda.device_count() if has_gpu else 0,
        gpu=torch.cuda.get_device_name() if has_gpu else "",
        gpu_bytes=total,
        gpu_free_bytes=free,
        host_bytes=host_bytes(),
        shared_bytes=_size(Path("/dev/shm")),
    )


def host_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """The machine's memory, or what the scheduler leaves to this job of it."""
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
    """Fatal: no GPU where the config is for GPUs, more ranks than GPUs, several kinds of GPU. Warning: memory that others hold."""
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
    figures |= {"gpu_gib": min(machine.gpu_bytes for machine in seen.values()) / GIB}
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


def _judge_host(context: Context, seen: Mapping[int, Machine], found: str, figures: Mapping[str, float]) -> Finding:
    small = [rank for rank, machine in seen.items() if machine.shared_bytes < LEAST_SHARED_GIB * GIB]
    if small:
        text = f"{found}; {who(context.allocation, small)}: /dev/shm has {seen[small[0]].shared_bytes / GIB:.2f} GiB"
        return Finding(level=Level.warning, found=text, advice="give the container more: --shm-size, --ipc=host", figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


DEVICES = Item(
    name="devices",
    where=Where.every_rank,
    kind=Machine,
    observe=_observe,
    judge=judge,
    timeout_seconds=120.0,
    needs=("config",),
)
