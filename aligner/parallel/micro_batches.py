"""The rows of a global batch for each data-parallel replica and micro-batch: a pure function, with the same result on all ranks.

By rows: contiguous shares, cut into equal slices. By tokens: rows are dealt out so that replicas have about equally many tokens (the
longest first, each to the replica with the least), and every replica's rows go into as few micro-batches as the token budget allows. Rows
that belong together (a preference pair) are one *unit* and stay neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Plan = list[list[list[int]]]  # row numbers by replica and micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatching:
    """The size of a micro-batch. `tokens` counts padding."""

    rows: int = 1  # units per micro-batch, if `tokens` is 0
    tokens: int = 0  # tokens per micro-batch; a single unit that is larger goes alone
    packed: bool = False  # rows one after the other: a row costs its own length, not that of the longest beside it


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Rows that stay neighbours, and their common number of tokens."""

    rows: tuple[int, ...]
    size: int


def shard_bounds(count: int, num_shards: int) -> list[tuple[int, int]]:
    """[start, stop) of each of `num_shards` contiguous, near-equal shares of `count` things."""
    return [(count * shard // num_shards, count * (shard + 1) // num_shards) for shard in range(num_shards)]


def plan_families(families: Sequence[Family], config: MicroBatching, *, num_replicas: int) -> Plan:
    """`plan` by tokens, with families for units: they are dealt out to the replicas, whose micro-batches are then filled."""
    sizes, fill = [family.size for family in families], _pack if config.packed else _pad
    bins = [fill(share, sizes, config.tokens) for share in _deal(sizes, num_replicas)]
    ordered = [sorted(sorted(numbers) for numbers in replica) for replica in bins]
    return [[[row for number in numbers for row in families[number].rows] for numbers in replica] for replica in ordered]


def plan(lengths: Sequence[int], config: MicroBatching, *, num_replicas: int, unit: int = 1, multiple: int = 1) -> Plan:
    """Rows (of `lengths` tokens each) by replica and micro-batch; with few units a replica may get none.

    Lengths are rounded up to a `multiple`, for splitting sequences. Raises ValueError if the rows are not whole units.
    """
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows do not come in units of {unit}")
    units = [range(start, start + unit) for start in range(0, len(lengths), unit)]
    if not config.tokens:
        bounds = shard_bounds(len(units), num_replicas)
        slices = [[units[i : min(i + config.rows, stop)] for i in range(start, stop, config.rows)] for start, stop in bounds]
        return [[[row for one in part for row in one] for part in parts] for parts in slices]
    rounded = [-(-length // multiple) * multiple for length in lengths]
    sizes = [sum(rounded[row] for row in one) if config.packed else unit * max(rounded[row] for row in one) for one in units]
    families = [Family(rows=tuple(one), size=size) for one, size in zip(units, sizes, strict=True)]
    return plan_families(families, config, num_replicas=num_replicas)


def _deal(sizes: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Unit numbers by replica: the largest units first, each to the replica that has the least so far (Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    for number in _largest_first(range(len(sizes)), sizes):
        least = min(range(num_replicas), key=lambda replica: (loads[replica], len(shares[replica]), replica))
        shares[least].append(number)
        loads[least] += sizes[number]
    return shares


def _pack(numbers: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: bins whose sizes add up to at most `capacity`."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in _largest_first(numbers, sizes):
        place = next((i for i, free in enumerate(room) if sizes[number] <= free), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(number)
        room[place] -= sizes[number]
    return bins


def _pad(numbers: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Neighbours in size share a bin, in which each costs as much as the largest."""
    bins: list[list[int]] = []
    for number in _largest_first(numbers, sizes):
        if bins and (len(bins[-1]) + 1) * sizes[bins[-1][0]] <= capacity:
            bins[-1].append(number)
        else:
            bins.append([number])
    return bins


def _largest_first(numbers: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return sorted(numbers, key=lambda number: (-sizes[number], number))
