"""All-reduce latency and bandwidth within and between the nodes, and which link is the slow one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch.distributed as dist

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where
from aligner.parallel import links, platform
from aligner.parallel.links import Link, Span
from aligner.planner.config import ClusterConfig, Device

SLOW = 0.5  # part of its class's median below which a link is called slow
POOR = 0.25  # part of the cluster file's rate below which a class is
_GROUP_TIMEOUT_SECONDS = 3600.0  # far beyond every item's: the preflight ends waits itself, and says more


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The links for which one rank speaks, as JSON."""

    backend: str
    links: list[dict[str, Any]] = field(default_factory=list)


def ensure_group(context: Context) -> None:
    """The process group for items with collectives; the first one makes it."""
    if not dist.is_initialized():
        allocation = context.allocation
        shared = context.config.run.ranks_per_gpu
        links.start_group(allocation.world, allocation.store, timeout_seconds=_GROUP_TIMEOUT_SECONDS, ranks_per_gpu=shared)


def _observe(context: Context) -> Measured:
    ensure_group(context)
    return Measured(backend=platform.backend(), links=[asdict(link) for link in links.measure(context.allocation.nodes)])


def judge(context: Context, seen: Mapping[int, Measured]) -> Finding:
    """Warning if a link has less than half of its class's median, or (on GPUs) a class a quarter of the cluster file's rate."""
    found = [_link(raw) for measured in seen.values() for raw in measured.links]
    if not found:
        return Finding(level=Level.ok, found="one rank: nothing to measure")
    lines, figures, slow = [f"{seen[0].backend} all-reduce, bus bandwidth"], {}, []
    for span in Span:
        of_span = [link for link in found if link.span is span]
        if not of_span:
            continue
        lines.append(describe(span, of_span))
        key, slowest = span.value.replace(" ", "_"), min(of_span, key=lambda link: link.rate)
        figures |= {f"{key}_gb_per_second": slowest.rate / 1e9, f"{key}_microseconds": max(link.latency_seconds for link in of_span) * 1e6}
        typical = median(link.rate for link in of_span)
        slow += [f"{link.name}: {link.rate / typical:.0%} of the median" for link in of_span if link.rate < SLOW * typical]
        slow += _against_plan(span, typical, context.config.cluster)
    if not slow:
        return Finding(level=Level.ok, found="\n".join(lines), figures=figures)
    advice = "compare that node's or GPU's link with the others (nvidia-smi topo -m, ibstat, NCCL_DEBUG=INFO), or leave it out: --exclude"
    return Finding(level=Level.warning, found="\n".join([*lines, "slow: " + "; ".join(slow[:4])]), advice=advice, figures=figures)


def describe(span: Span, of_span: Sequence[Link]) -> str:
    """One class in a line, its slowest link named."""
    slowest = min(of_span, key=lambda link: link.rate)
    latency = max(link.latency_seconds for link in of_span) * 1e6
    count = f"{len(of_span)} measured, slowest " if len(of_span) > 1 else ""
    return f"{span.value}: {slowest.rate / 1e9:.2f} GB/s, {latency:.0f} us ({count}{slowest.name})"


def _against_plan(span: Span, typical: float, cluster: ClusterConfig) -> list[str]:
    if cluster.device != Device.gpu or span is Span.all_ranks:
        return []
    name = "nvlink_gb_per_second" if span is Span.within_node else "network_gb_per_second"
    planned = cluster.nvlink_gb_per_second if span is Span.within_node else cluster.network_gb_per_second
    if typical >= POOR * planned * 1e9:
        return []
    return [f"{span.value} {typical / 1e9:.1f} GB/s, and cluster.{name}={planned:g}"]


def _link(raw: Mapping[str, Any]) -> Link:
    return Link(**dict(raw) | {"span": Span(raw["span"]), "nodes": tuple(raw["nodes"])})


NETWORK = Item(
    "network",
    Where.every_rank,
    _observe,
    judge,
    timeout_seconds=180.0,
    needs=("versions", "config", "devices"),
    advice="NCCL_DEBUG=INFO, and the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); or leave those nodes out: --exclude",
)
