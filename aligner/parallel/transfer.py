"""Executes a resharding plan: buckets are broadcast to the ranks that lack them, gathered if the split changes, and cut.

Every rank calls these functions with the same plan. The stage that holds a bucket broadcasts it over the pipeline group (each rank its
tensor-parallel part), and an expert's over the expert-parallel group; parts that a rank already holds are copied without a bucket. So a
rank never holds more than the weights it trains, the weights it needs and one bucket (on a GPU two: one in transfer, one being cut).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.parallel import platform
from aligner.parallel.reshard import Bucket, Move, Piece, Portion, pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """This rank's groups of the old layout, over which tensors travel."""

    pp: dist.ProcessGroup
    ep: dist.ProcessGroup
    tp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup

    def holds(self, move: Move) -> bool:
        """Whether this rank has a shard of the tensor in training."""
        return self.pp.rank() == move.stage and move.expert_rank in (None, self.ep.rank())

    def splits(self, move: Move) -> dist.ProcessGroup:
        return self.tp if move.expert_rank is None else self.expert_tp


def block_group(size: int, *, backend: str | None = None) -> dist.ProcessGroup | None:
    """The group of this rank's block of `size` consecutive ranks; None for blocks of one. Makes the groups of all blocks. Collective."""
    own = None
    for start in range(0, dist.get_world_size() if size > 1 else 0, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks, backend=backend)
        if dist.get_rank() in ranks:
            own = group
    return own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A portion of a bucket: its place in each rank's flat part, and the pieces that this rank takes."""

    portion: Portion
    start: int
    stop: int
    taken: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transfer:
    """This rank's work for one bucket."""

    bucket: Bucket
    steps: tuple[_Step, ...]
    is_here: bool  # every rank already has its part of the bucket: nothing travels


class Refill:
    """A resharding plan for one rank, of number `index` in the new split. Each run writes `bytes_per_run` into its tensors."""

    def __init__(self, buckets: Sequence[Bucket], *, lanes: Lanes, index: int) -> None:
        self._lanes = lanes
        self._transfers = [_prepare(bucket, lanes, index) for bucket in buckets]
        steps = [step for transfer in self._transfers for step in transfer.steps]
        self.bytes_per_run = sum(step.portion.move.index_bytes * piece.length for step in steps for piece in step.taken)

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Fill `targets` from `sources`, by the moves' names. Collective over the world. Returns once it is queued on the device."""
        for transfer in self._transfers:
            if transfer.is_here:
                _cut(transfer, targets, lambda step: dict.fromkeys((piece.peer for piece in step.taken), _window(step, sources)))
        travelling = [transfer for transfer in self._transfers if not transfer.is_here]
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        depth = 2 if torch.cuda.is_available() else 1  # buckets in transfer or waiting to be cut
        slots = [_Slot(travelling, self._lanes, stream) for _ in range(min(depth, len(travelling)))]
        waiting: deque[tuple[_Transfer, _Slot]] = deque()
        for number, transfer in enumerate(travelling):
            slot = slots[number % len(slots)]
            slot.bring(transfer, sources)
            waiting.append((transfer, slot))
            if len(waiting) == len(slots):
                _cut_arrived(*waiting.popleft(), targets)
        while waiting:
            _cut_arrived(*waiting.popleft(), targets)


def _prepare(bucket: Bucket, lanes: Lanes, index: int) -> _Transfer:
    is_expert, gathered = bucket.first.expert_rank is not None, bucket.first.gathered
    group = lanes.splits(bucket.first)
    peers = range(group.size()) if gathered else (group.rank(),)
    steps, offset = [], 0
    for portion in bucket.portions:
        move, stop = portion.move, offset + math.prod(portion.shape)
        taken = tuple(pieces(move.source, move.target, index, peers=peers, window=portion.window))
        steps.append(_Step(portion=portion, start=offset, stop=stop, taken=taken))
        offset = stop
    is_here = lanes.pp.size() == 1 and not (is_expert and lanes.ep.size() > 1) and not gathered
    return _Transfer(bucket=bucket, steps=tuple(steps), is_here=is_here)


class _Slot:
    """Memory for one bucket. On a GPU it is filled in `stream`, while another one is cut in the current stream."""

    def __init__(self, transfers: Sequence[_Transfer], lanes: Lanes, stream: torch.cuda.Stream | None) -> None:
        self._lanes = lanes
        self._stream = stream
        own = max(transfer.bucket.num_bytes for transfer in transfers)
        gathered = [transfer.bucket for transfer in transfers if transfer.bucket.first.gathered]
        everyones = max((lanes.splits(bucket.first).size() * bucket.num_bytes for bucket in gathered), default=0)
        self._own = torch.empty(own, dtype=torch.uint8, device=platform.device())
        self._everyones = torch.empty(everyones, dtype=torch.uint8, device=platform.device())
        self._parts: dict[int, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def bring(self, transfer: _Transfer, sources: Mapping[str, Tensor]) -> None:
        """Start fetching a bucket once this slot's previous one has been cut."""
        if self._stream is None:
            self._parts = self._bring(transfer, sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._parts = self._bring(transfer, sources)
            self._event = self._stream.record_event()

    def arrived(self) -> Mapping[int, Tensor]:
        """The bucket's flat source parts by tensor-parallel rank of the old layout: all if it is gathered, else this rank's."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._parts

    def _bring(self, transfer: _Transfer, sources: Mapping[str, Tensor]) -> dict[int, Tensor]:
        bucket, lanes = transfer.bucket, self._lanes
        first = bucket.first
        flat = self._own[: bucket.num_bytes].view(first.dtype)
        is_expert = first.expert_rank is not None
        if not is_expert or lanes.ep.rank() == first.expert_rank:
            if lanes.pp.rank() == first.stage:
                _copy([(flat[step.start : step.stop].view(step.portion.shape), _window(step, sources)) for step in transfer.steps])
            _broadcast(flat, first.stage, lanes.pp)
        if is_expert:
            _broadcast(flat, first.expert_rank, lanes.ep)
        group = lanes.splits(first)
        if not first.gathered:
            return {group.rank(): flat}
        parts = self._everyones[: group.size() * bucket.num_bytes].view(first.dtype)
        dist.all_gather_into_tensor(parts, flat, group=group)
        return dict(enumerate(parts.view(group.size(), -1)))


def _cut_arrived(transfer: _Transfer, slot: _Slot, targets: Mapping[str, Tensor]) -> None:
    parts = slot.arrived()
    _cut(transfer, targets, lambda step: {peer: part[step.start : step.stop].view(step.portion.shape) for peer, part in parts.items()})


def _window(step: _Step, sources: Mapping[str, Tensor]) -> Tensor:
    """The portion of this rank's own source part."""
    start, stop = step.portion.window
    return sources[step.portion.move.name].detach().narrow(step.portion.move.dim, start, stop - start)


def _cut(transfer: _Transfer, targets: Mapping[str, Tensor], parts_of: Callable[[_Step], Mapping[int, Tensor]]) -> None:
    """Copy this rank's pieces of a bucket to their targets; `parts_of` gives a portion's source parts by peer."""
    copies = []
    for step in transfer.steps:
        dim, begin, parts = step.portion.move.dim, step.portion.window[0], parts_of(step)
        for piece in step.taken:
            part = parts[piece.peer].narrow(dim, piece.start - begin, piece.length)
            copies.append((targets[step.portion.move.name].narrow(dim, piece.target, piece.length), part))
    _copy(copies)


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor to the first; the contiguous ones (most) in one launch."""
    dense = [pair for pair in copies if pair[0].is_contiguous() and pair[1].is_contiguous()]
    if dense:
        torch._foreach_copy_([target for target, _ in dense], [source for _, source in dense])
    for target, source in copies:
        if not (target.is_contiguous() and source.is_contiguous()):
            target.copy_(source)


def _broadcast(flat: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(flat, group=group, group_src=source)


def sum_over_holders(rows: Tensor, is_expert: Tensor, lanes: Lanes) -> Tensor:
    """Sum rows [N, ...], one for each tensor, over the ranks that hold parts of it; others contribute zeros. `is_expert`: bool [N]."""
    experts, others = rows[is_expert], rows[~is_expert]
    for part, groups in ((others, (lanes.tp, lanes.pp)), (experts, (lanes.expert_tp, lanes.ep, lanes.pp))):
        for group in groups:
            if group.size() > 1 and part.numel():
                dist.all_reduce(part, group=group)
    total = torch.empty_like(rows)
    total[is_expert], total[~is_expert] = experts, others
    return total
