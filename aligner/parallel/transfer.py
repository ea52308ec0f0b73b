"""Carries a resharding plan out: buckets are broadcast to the ranks that lack them, gathered where the split changes, and cut.

Every rank calls these, with the same plan. A bucket is broadcast over the pipeline group from the stage that holds it (every rank's own
tensor-parallel part), then, for an expert, over the expert-parallel group; where the number of tensor-parallel ranks changes, the parts are
gathered over the old tensor-parallel group. So a rank holds at any time the weights it trains, the weights it needs and one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.parallel import platform
from aligner.parallel.reshard import Bucket, pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """The groups of the old layout that this rank's tensors travel in."""

    pp: dist.ProcessGroup
    ep: dist.ProcessGroup
    tp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup


def block_group(size: int) -> dist.ProcessGroup | None:
    """The group of this rank's block of `size` consecutive ranks, made for every block at once; None for blocks of one. Collective."""
    own = None
    for start in range(0, dist.get_world_size() if size > 1 else 0, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def refill(buckets: Sequence[Bucket], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], *, lanes: Lanes, index: int) -> None:
    """Fill `targets` (this rank's part, as rank `index` of the new split, of every tensor) from `sources` (its tensors of the old split).

    Collective over the world; both mappings are by the moves' names.
    """
    for bucket in buckets:
        parts = _bring(bucket, sources, lanes)
        offset = 0
        for portion in bucket.portions:
            move, size = portion.move, math.prod(portion.shape)
            target = targets[move.name]
            for piece in pieces(move.source, move.target, index, peers=list(parts), window=portion.window):
                part = parts[piece.peer][offset : offset + size].view(portion.shape)
                taken = part.narrow(move.dim, piece.start - portion.window[0], piece.length)
                target.narrow(move.dim, piece.target, piece.length).copy_(taken)
            offset += size


def _bring(bucket: Bucket, sources: Mapping[str, Tensor], lanes: Lanes) -> dict[int, Tensor]:
    """The bucket's source parts, flat, by tensor-parallel rank of the old layout: all of them where it is gathered, else this rank's."""
    first = bucket.first
    flat = torch.empty(bucket.num_items, dtype=first.dtype, device=platform.device())
    is_expert = first.expert_rank is not None
    if not is_expert or lanes.ep.rank() == first.expert_rank:
        if lanes.pp.rank() == first.stage:
            _pack(bucket, sources, flat)
        _broadcast(flat, first.stage, lanes.pp)
    if is_expert:
        _broadcast(flat, first.expert_rank, lanes.ep)
    group = lanes.expert_tp if is_expert else lanes.tp
    if not first.gathered:
        return {group.rank(): flat}  # all that this rank needs
    parts = flat.new_empty(group.size() * flat.numel())
    dist.all_gather_into_tensor(parts, flat, group=group)
    return dict(enumerate(parts.view(group.size(), -1)))


def _pack(bucket: Bucket, sources: Mapping[str, Tensor], flat: Tensor) -> None:
    offset = 0
    for portion in bucket.portions:
        start, stop = portion.window
        size = math.prod(portion.shape)
        own = sources[portion.move.name].detach().narrow(portion.move.dim, start, stop - start)
        flat[offset : offset + size].view(portion.shape).copy_(own)
        offset += size


def _broadcast(flat: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(flat, group=group, group_src=source)
