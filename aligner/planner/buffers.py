"""Megatron-Core's flat parameter and gradient buffers and the optimizer's shards of them, to the element. Pure.

`DistributedDataParallel` lays the parameters of one kind (dtype; dense or expert) into one buffer, in reverse order. With the distributed
optimizer each parameter starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(shards, 128); every rank owns an
equal slice of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a rank's shard."""

    name: str
    numel: int
    itemsize: int  # bytes per element
    is_expert: bool = False  # its replicas are the expert-data-parallel ranks
    is_split: bool = False  # over the tensor-parallel ranks (the expert-tensor-parallel ones for an expert)
    own_bucket: bool = False  # the tied embedding
    is_frozen: bool = False  # it is in no buffer, and has neither gradient nor optimizer state
    is_adapter: bool = False  # of a linear layer, which rollout engines have it merged with


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One flat buffer: bounds of its parameters and of its buckets."""

    numel: int
    parameters: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    def owned(self, num_shards: int) -> list[int]:
        """Parameter elements (no padding) that each of the distributed optimizer's shards holds: an equal slice of every bucket."""
        held = [0] * num_shards
        places = iter(self.parameters)
        place = next(places, None)
        for start, stop in self.buckets:
            size = (stop - start) // num_shards
            while place is not None and place[0] < stop:
                begin, end = place[0] - start, place[1] - start
                for shard in range(begin // size, (end - 1) // size + 1):
                    held[shard] += min(end, (shard + 1) * size) - max(begin, shard * size)
                place = next(places, None)
        return held


@dataclass(frozen=True, kw_only=True, slots=True)
class Replication:
    """Placement of a rank's training state."""

    distributed: bool  # the distributed optimizer
    dense_shards: int  # dp x cp
    expert_shards: int  # replicas of an expert
    bucket_elements: int | None  # None: one bucket per buffer
    moment_bytes: int = 8  # both Adam moments of an element
    main_bytes: int = 4  # float32 copy of a 2-byte weight


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Storage of one rank: weights, main gradients, optimizer state (moments and float32 main weights, without its scalars)."""

    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights, gradients=self.gradients + other.gradients, optimizer=self.optimizer + other.optimizer
        )


def lay_out(parameters: Sequence[Parameter], *, distributed: bool, shards: int, bucket_elements: int | None) -> Buffer:
    """The buffer of parameters of one kind, given in the module's order."""
    align = 64 if distributed else 1
    bucket_align = math.lcm(shards, 128) if distributed else 1
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = begin = 0  # of the open bucket, of the next parameter
    is_open = False

    def close(end: int) -> int:
        nonlocal start, is_open
        end = _up(end, bucket_align)
        buckets.append((start, end))
        start, is_open = end, False
        return end

    for parameter in reversed(parameters):
        begin = _up(begin, align)
        alone = parameter.own_bucket and distributed
        if alone and is_open:
            begin = close(begin)
        end = begin + parameter.numel
        places.append((begin, end))
        is_open = True
        full = bucket_elements is not None and end - start >= bucket_elements
        begin = close(end) if full or alone else end
    if is_open:
        close(begin)
    return Buffer(numel=start, parameters=tuple(places), buckets=tuple(buckets))


def state_bytes(parameters: Sequence[Parameter], replication: Replication, *, dp_rank: int | None = None) -> StateBytes:
    """Bytes of one chunk's training state on the rank with this data-parallel rank; None: the fullest rank.

    Parameters in 4 bytes are their own main weights.
    """
    total = frozen_bytes([p for p in parameters if p.is_frozen])
    trained = [p for p in parameters if not p.is_frozen]
    kinds = sorted(trained, key=lambda p: (p.is_expert, p.itemsize))  # stable: the module's order within a kind
    for (is_expert, itemsize), group in groupby(kinds, key=lambda p: (p.is_expert, p.itemsize)):
        own = list(group)
        shards = replication.expert_shards if is_expert else replication.dense_shards
        buffer = lay_out(own, distributed=replication.distributed, shards=shards, bucket_elements=replication.bucket_elements)
        elements = sum(p.numel for p in own)
        if replication.distributed:
            by_shard = buffer.owned(shards)
            held = max(by_shard) if dp_rank is None else by_shard[dp_rank % shards]
            weights = buffer.numel * itemsize
        else:
            held, weights = elements, elements * itemsize
        per_element = replication.moment_bytes + (replication.main_bytes if itemsize == 2 else 0)
        total += StateBytes(weights=weights, gradients=buffer.numel * 4, optimizer=held * per_element)
    return total


def frozen_bytes(parameters: Sequence[Parameter]) -> StateBytes:
    """A model that is not trained."""
    return StateBytes(weights=sum(p.numel * p.itemsize for p in parameters), gradients=0, optimizer=0)


def approximate_state_bytes(parameters: Sequence[Parameter], replication: Replication) -> StateBytes:
    """As `state_bytes` without padding; the search compares thousands of layouts with it."""
    weights = gradients = optimizer = 0
    for p in parameters:
        shards = (replication.expert_shards if p.is_expert else replication.dense_shards) if replication.distributed else 1
        weights += p.numel * p.itemsize
        if p.is_frozen:
            continue
        gradients += p.numel * 4
        optimizer += p.numel * (replication.moment_bytes + (replication.main_bytes if p.itemsize == 2 else 0)) // shards
    return StateBytes(weights=weights, gradients=gradients, optimizer=optimizer)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
