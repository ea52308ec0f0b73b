"""Plans the move from one split of a model's tensors to another, without touching a tensor.

A `Sharding` lists the indices of a full tensor that each of n ranks holds along one dimension, in the rank's order. Fused matrices need no
special case: a rank's part of `[gate; up]` is two intervals, a query-key-value group of two ranks is in both parts, padded vocabulary rows
lie beyond the tensor's end. `pieces` intersects two shardings; `plan` cuts the moved parts into buckets of bounded size.
`aligner.parallel.transfer` executes a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.errors import ConfigError

Interval = tuple[int, int]  # [start, stop) of indices of the full tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Each rank's part of a full tensor along `dim`: `shards[i]` are rank i's intervals, in the order of its own indices."""

    dim: int
    shards: tuple[tuple[Interval, ...], ...]

    def held_by(self, index: int) -> tuple[Interval, ...]:
        return self.shards[index if len(self.shards) > 1 else 0]

    @property
    def extent(self) -> int:
        """Number of indices of the full tensor, without padding that the shards omit."""
        return max(stop for held in self.shards for _, stop in held)

    def size(self, index: int) -> int:
        """Number of indices that rank `index` holds."""
        return sum(stop - start for start, stop in self.held_by(index))


def replicated(size: int) -> Sharding:
    """A single shard: every rank holds the whole tensor."""
    return Sharding(dim=0, shards=(((0, size),),))


def even(size: int, num_shards: int, *, dim: int = 0, blocks: int = 1) -> Sharding:
    """Equal parts of each of `blocks` equal blocks (`[gate; up]` has 2). Raises ConfigError if they would not be equal."""
    block = size // blocks
    if block * blocks != size or block % num_shards:
        raise ConfigError(f"a dimension of {size} in {blocks} blocks cannot be split over {num_shards} tensor-parallel ranks")
    part = block // num_shards
    return Sharding(
        dim=dim,
        shards=tuple(tuple((b * block + i * part, b * block + (i + 1) * part) for b in range(blocks)) for i in range(num_shards)),
    )


def grouped(groups: int, queries: int, head: int, num_shards: int) -> Sharding:
    """Fused query-key-value rows, `groups` times `[queries heads of q, k, v]` of `head` rows each: whole heads for every rank.

    With more ranks than groups, the ranks of a group divide its queries and each holds its k and v. Raises ConfigError if neither number
    divides the other, or the queries of a group cannot be divided.
    """
    width = (queries + 2) * head
    if groups % num_shards == 0:
        return even(groups * width, num_shards)
    sharers = num_shards // groups
    if num_shards % groups or queries % sharers:
        raise ConfigError(f"{groups} key-value groups of {queries} query heads cannot be split over {num_shards} tensor-parallel ranks")
    own = queries // sharers * head
    shards = []
    for index in range(num_shards):
        start, share = index // sharers * width, index % sharers
        shards.append(((start + share * own, start + (share + 1) * own), (start + queries * head, start + width)))
    return Sharding(dim=0, shards=tuple(shards))


def padded(size: int, padded_size: int, num_shards: int) -> Sharding:
    """Equal parts of a vocabulary padded from `size` to `padded_size` rows, without the padding: the last parts may be short or empty."""
    whole = even(padded_size, num_shards)
    return Sharding(dim=0, shards=tuple(((min(start, size), min(stop, size)),) for ((start, stop),) in whole.shards))


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One tensor on its way from a source sharding to a target sharding; the same on every rank.

    The ranks of pipeline stage `stage` hold it; for an expert's tensor only those with expert-parallel rank `expert_rank` (None for the
    rest of the model). `shape` is the shape of one source shard. Both shardings are along the same dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Sharding
    target: Sharding
    stage: int
    expert_rank: int | None = None

    @property
    def dim(self) -> int:
        return self.source.dim

    @property
    def gathered(self) -> bool:
        """Whether the source shards must be gathered before the target's can be cut from them."""
        return len(self.source.shards) > 1 and not _self_sufficient(self.source, self.target)

    @property
    def index_bytes(self) -> int:
        """Bytes of one index along `dim` of a source shard."""
        return math.prod(self.shape) // self.shape[self.dim] * self.dtype.itemsize

    def target_shape(self, index: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.target.size(index), *self.shape[self.dim + 1 :])


def _self_sufficient(source: Sharding, target: Sharding) -> bool:
    """Whether every rank of the new split already holds its whole part, under the same number in the old split."""
    if len(source.shards) != len(target.shards):
        return False
    return all(
        sum(piece.length for piece in pieces(source, target, index, peers=(index,))) == target.size(index)
        for index in range(len(target.shards))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """`length` indices: from `start` in the source shard of rank `peer` to `target` in this rank's target shard."""

    peer: int
    start: int
    target: int
    length: int


def pieces(source: Sharding, target: Sharding, index: int, *, peers: Sequence[int], window: Interval | None = None) -> list[Piece]:
    """The pieces of target rank `index` from the source shards of `peers`, within each shard's `window` of indices (None: all)."""
    found = []
    for peer in peers:
        for position, (start, stop) in _placed(source.held_by(peer)):
            if window is not None:  # in the shard's own indices
                first, last = max(window[0] - position, 0), min(window[1] - position, stop - start)
                position, start, stop = position + first, start + first, start + last
            for place, (low, high) in _placed(target.held_by(index)):
                begin, end = max(start, low), min(stop, high)
                if begin < end:
                    found.append(Piece(peer=peer, start=position + begin - start, target=place + begin - low, length=end - begin))
    return found


def _placed(intervals: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Each interval with its start in the shard's own indices."""
    placed, position = [], 0
    for start, stop in intervals:
        placed.append((position, (start, stop)))
        position += stop - start
    return placed


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """The indices `window` along `dim` of every source shard of a move."""

    move: Move
    window: Interval

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this portion of one source shard."""
        move = self.move
        return (*move.shape[: move.dim], self.window[1] - self.window[0], *move.shape[move.dim + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Portions that travel together: from one stage and one expert-parallel rank, of one dtype, all gathered or none."""

    portions: tuple[Portion, ...]

    @property
    def first(self) -> Move:
        """A move of the bucket, for the properties that all of them share."""
        return self.portions[0].move

    @property
    def num_bytes(self) -> int:
        """Of one rank's source part."""
        return sum(math.prod(portion.shape) for portion in self.portions) * self.first.dtype.itemsize


def plan(moves: Sequence[Move], *, bucket_bytes: int) -> list[Bucket]:
    """Cut all moves into buckets of at most `bucket_bytes` on each rank, besides the tensors that it sends and keeps.

    A rank holds its own part of a bucket, or every rank's part of a gathered bucket. A single index above the limit gets its own bucket.
    """
    buckets: list[Bucket] = []
    pending: dict[tuple, list[Portion]] = {}
    room: dict[tuple, int] = {}
    for move in moves:
        key = (move.stage, move.expert_rank, move.dtype, move.gathered)
        index_bytes = move.index_bytes * (1 + len(move.source.shards) * move.gathered)
        start, size = 0, move.shape[move.dim]
        while start < size:
            fits = room.get(key, 0) // index_bytes
            if fits <= 0:
                if pending.get(key):
                    buckets.append(Bucket(portions=tuple(pending[key])))
                pending[key], room[key] = [], bucket_bytes
                fits = max(bucket_bytes // index_bytes, 1)
            stop = min(start + fits, size)
            pending[key].append(Portion(move=move, window=(start, stop)))
            room[key] -= (stop - start) * index_bytes
            start = stop
    return buckets + [Bucket(portions=tuple(portions)) for portions in pending.values() if portions]
