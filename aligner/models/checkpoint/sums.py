"""Sums over the bit patterns of a checkpoint's tensors: taken in memory before writing, compared after loading.

A tensor's sum adds its elements' bit patterns, each times an odd number for each of its indices in the whole model's tensor, modulo 2^64:
it adds up over any split, and reveals a changed or misplaced element. It leaves out vocabulary padding, which depends on the layout.
`sums.json` has the sum, the number of elements and the type of each tensor.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.errors import WrongContents
from aligner.models.checkpoint import files
from aligner.parallel.collectives import gather_objects
from aligner.parallel.mcore import ShardedTensor, dist_checkpointing, sharded_leaves

SUMS = "sums.json"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 24}  # bounds the 64-bit copies that are summed: on a CPU they stay in its cache
_MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """The sum of a whole tensor."""

    sum: str  # hexadecimal
    elements: int
    dtype: str


@dataclass(slots=True)
class _Copies:
    """(elements, sum) of every replica of a tensor, by replica number; the one with all 0s is saved."""

    dtype: str
    by_replica: dict[tuple[int, ...], tuple[int, int]]

    def add(self, replica: tuple[int, ...], elements: int, total: int) -> None:
        known, so_far = self.by_replica.get(replica, (0, 0))
        self.by_replica[replica] = (known + elements, (so_far + total) % _MODULUS)


Found = Mapping[str, _Copies]


def find(states: Iterable[Any], *, vocabulary: int) -> Found:
    """The sums of sharded states, the same on every rank. Collective. `vocabulary`: rows of an embedding that are not padding."""
    shards = [shard for state in states for shard in tensors(state)]
    own: dict[str, _Copies] = {}
    for shard, total in zip(shards, _numbers([_sum(shard, vocabulary) for shard in shards]), strict=True):
        copies = own.setdefault(shard.key, _Copies(dtype=str(shard.data.dtype), by_replica={}))
        replica = (shard.replica_id,) if isinstance(shard.replica_id, int) else tuple(shard.replica_id)
        copies.add(replica, _within(shard, vocabulary).numel(), total)
    return joined(gather_objects(own))


def joined(parts: Iterable[Found]) -> Found:
    """The sums of tensors of which each part has some elements."""
    whole: dict[str, _Copies] = {}
    for part in parts:
        for key, copies in part.items():
            kept = whole.setdefault(key, _Copies(dtype=copies.dtype, by_replica={}))
            for replica, (elements, total) in copies.by_replica.items():
                kept.add(replica, elements, total)
    return whole


def saved(found: Found) -> dict[str, Sum]:
    """The sums of the copies that are saved."""
    sums = {}
    for key, copies in sorted(found.items()):
        elements, total = next(one for replica, one in copies.by_replica.items() if not any(replica))
        sums[key] = Sum(sum=f"{total:016x}", elements=elements, dtype=copies.dtype)
    return sums


def write(directory: Path, sums: Mapping[str, Sum]) -> None:
    """Make `sums.json` in the directory of a checkpoint that is being written."""
    files.write_text(directory / SUMS, json.dumps({key: asdict(one) for key, one in sums.items()}, indent=1) + "\n")


def read(directory: Path) -> dict[str, Sum]:
    """The sums that a checkpoint records; empty for an earlier version."""
    path = directory / SUMS
    return {key: Sum(**entry) for key, entry in json.loads(path.read_text()).items()} if path.exists() else {}


def compare(wanted: Mapping[str, Sum], found: Found, what: str) -> None:
    """Raise WrongContents if any copy of a tensor differs from the saved one. Converted types cannot be compared."""
    wrong = []
    for key, copies in found.items():
        if (expected := wanted.get(key)) is not None and copies.dtype == expected.dtype:
            whole = [total for elements, total in copies.by_replica.values() if elements == expected.elements]
            if not whole or any(f"{total:016x}" != expected.sum for total in whole):
                wrong.append(key)
    if wrong:
        raise WrongContents(
            f"{what}: {len(wrong)} of {len(found)} tensors are not those that were in memory when they were saved ({SUMS}): "
            f"{', '.join(sorted(wrong)[:3])}{', ...' if len(wrong) > 3 else ''}"
        )


def read_back(directory: Path, shards: Sequence[ShardedTensor], *, vocabulary: int) -> Found:
    """The sums of `shards` as stored in a distributed checkpoint directory, read into separate host memory. Every rank calls it."""
    blank = {str(number): replace(shard, data=torch.empty(shard.local_shape, dtype=shard.dtype)) for number, shard in enumerate(shards)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(dict(blank), str(directory))
    return find([{name: replace(shard, data=loaded[name]) for name, shard in blank.items()}], vocabulary=vocabulary)


def tensors(state: Any) -> Iterator[ShardedTensor]:
    """The sharded tensors of a sharded state, those that factories make of a parameter among them."""
    for leaf in sharded_leaves(state):
        if isinstance(leaf, ShardedTensor):
            yield leaf
        else:
            yield from tensors(leaf.build())


def _numbers(scalars: Sequence[Tensor]) -> list[int]:
    found = [0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        places = [place for place, scalar in enumerate(scalars) if scalar.device == device]
        for place, number in zip(places, torch.stack([scalars[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found


def _within(shard: ShardedTensor, vocabulary: int) -> Tensor:
    if not shard.allow_shape_mismatch:
        return shard.data
    return shard.data[: max(0, vocabulary - shard.global_offset[shard.prepend_axis_num])]


def _sum(shard: ShardedTensor, vocabulary: int) -> Tensor:
    data = _within(shard, vocabulary).detach()
    first = math.prod(2 * index + 1 for index in shard.global_offset[: shard.prepend_axis_num])
    return _weighted(data, shard.global_offset[shard.prepend_axis_num :]) * (first % (1 << 63))


def _weighted(data: Tensor, offset: tuple[int, ...]) -> Tensor:
    """Weighted sum of the bit patterns of a tensor whose first element has the indices `offset`."""
    if not data.numel():
        return torch.zeros((), dtype=torch.int64, device=data.device)
    if data.dim() > 1 and data.shape[0] == 1:
        return _weighted(data[0], offset[1:]) * (2 * offset[0] + 1)
    at_a_time = _ELEMENTS_AT_A_TIME[data.device.type]
    if data.dim() > 1 and data.numel() > at_a_time:
        rows = max(1, at_a_time * data.shape[0] // data.numel())
        starts = range(0, data.shape[0], rows)
        return torch.stack([_weighted(data[start : start + rows], (offset[0] + start, *offset[1:])) for start in starts]).sum()
    sums = data.view(_BITS[data.element_size()])
    for dim in reversed(range(data.dim())):
        indices = torch.arange(offset[dim], offset[dim] + data.shape[dim], device=data.device)
        sums = (sums * (2 * indices + 1)).sum(dim=-1)
    return sums.long()
