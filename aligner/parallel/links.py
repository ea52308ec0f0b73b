"""Communication speed: all-reduce time and rate within every node, between pairs of nodes, and over all ranks.

A pair is two nodes whose numbers differ in one bit (i and i XOR 1, 2, 4, ...). All pairs of a round run at the same time. Every node is
measured against log2(N) others; all links of a slow node are slow. On GPUs every local rank pairs with its counterpart (each GPU has its
own path to the network), else only the first ranks of the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from aligner.errors import LaunchError
from aligner.parallel import platform

_LATENCY_REPEATS, _RATE_REPEATS = 20, 5
_RATE_BYTES = {"nccl": 128 << 20, "gloo": 2 << 20}


class Span(str, Enum):
    """The ranks that a measurement spans."""

    within_node = "within a node"
    between_nodes = "between nodes"
    all_ranks = "all ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One measurement. `rate` is the bus bandwidth in bytes per second of each rank's link in one direction."""

    span: Span
    name: str  # node, or pair of nodes with the local rank
    nodes: tuple[str, ...]
    ranks: int
    latency_seconds: float
    rate: float


def measure(nodes: Sequence[str]) -> list[Link]:
    """The measurements that this rank reports, as the first of its group; collective. Raises LaunchError for a wrong sum."""
    rank = dist.get_rank()
    found: list[Link] = []
    members = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    if len(members) > 1:
        found += _measure_among(members, Span.within_node, nodes[rank], (nodes[rank],))
    for matches in rounds(nodes, every_rank=platform.backend() == "nccl"):
        _all_reduce(torch.ones(1, device=platform.device()), dist.group.WORLD)  # all pairs of a round start together
        for pair, lane in matches:
            if rank in pair:
                ends = tuple(nodes[end] for end in pair)
                name = " - ".join(ends) + (f", local rank {lane}" if platform.backend() == "nccl" else "")
                found += _measure_among(list(pair), Span.between_nodes, name, ends)
    if dist.get_world_size() > 1:
        found += _measure(dist.group.WORLD, Span.all_ranks, f"{dist.get_world_size()} ranks", tuple(dict.fromkeys(nodes)))
    return found


def rounds(nodes: Sequence[str], *, every_rank: bool) -> list[list[tuple[tuple[int, int], int]]]:
    """The measured pairs of ranks, with their local rank, round by round; a round has each rank at most once. Pure."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    ranks = list(by_node.values())
    lanes = min(map(len, ranks)) if every_rank else 1
    found, distance = [], 1
    while distance < len(ranks):
        matches = [(first, first ^ distance) for first in range(len(ranks)) if first < first ^ distance < len(ranks)]
        found.append([((ranks[first][lane], ranks[second][lane]), lane) for first, second in matches for lane in range(lanes)])
        distance *= 2
    return found


def _measure_among(ranks: list[int], span: Span, name: str, nodes: tuple[str, ...]) -> list[Link]:
    """Measure in a temporary group that only `ranks` make. torch derives a group's name from its ranks and from the process's number of
    groups: if the group stayed, processes with different numbers could no longer form one."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    try:
        return _measure(group, span, name, nodes)
    finally:
        dist.destroy_process_group(group)


def _measure(group: ProcessGroup, span: Span, name: str, nodes: tuple[str, ...]) -> list[Link]:
    """All members call it; the first one gets the link."""
    size, device = group.size(), platform.device()
    small = torch.ones(1, device=device)
    num_bytes = _RATE_BYTES[platform.backend()]
    large = torch.ones(num_bytes // 4, device=device)
    _all_reduce(large, group)  # connections are made
    if float(large[-1]) != size or float(large[0]) != size:
        raise LaunchError(f"{name}: the sum of {size} ones is {float(large[0])} and {float(large[-1])}: data is damaged on the way")
    latency = min(_timed(small, group) for _ in range(_LATENCY_REPEATS))
    seconds = min(_timed(large, group) for _ in range(_RATE_REPEATS))
    if group.rank() != 0:
        return []
    rate = num_bytes / seconds * 2 * (size - 1) / size
    return [Link(span=span, name=name, nodes=nodes, ranks=size, latency_seconds=latency, rate=rate)]


def _timed(tensor: torch.Tensor, group: ProcessGroup) -> float:
    platform.synchronize()
    started = time.perf_counter()
    _all_reduce(tensor, group)
    return time.perf_counter() - started


def _all_reduce(tensor: torch.Tensor, group: ProcessGroup | None) -> None:
    dist.all_reduce(tensor, group=group)
    platform.synchronize()
