"""Checks that an engine's weights after a refit are finite, and bit for bit the training weights.

A checksum is a sum over a tensor's bit patterns, modulo 2^64, each times an odd number for its place along the split dimension. So the
checksum of a whole is the sum of its parts' checksums for any split, and a part in the wrong place is noticed.

`negated` tests whether a refit reaches the engine: then it must sample as the negated policy does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aligner.models.modules.build import LanguageModel
from aligner.parallel.reshard import Move, Sharding, pieces
from aligner.parallel.transfer import Lanes, sum_over_holders

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with a NaN or an infinity, and their numbers; one pass, and one wait for the device."""
    named = [(name, tensor.detach()) for name, tensor in tensors.items() if tensor.numel()]
    if not named:
        return []
    finite = torch.stack([largest.isfinite() for largest in magnitudes([tensor for _, tensor in named])])
    bad = [pair for pair, good in zip(named, finite.tolist(), strict=True) if not good]
    return [f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} elements)" for name, tensor in bad]


def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A scalar for each tensor, finite if all of its elements are; allocates no other memory."""
    if tensors[0].is_cuda:
        return list(torch._foreach_norm(tensors, float("inf")))  # fused over all of them
    return [torch.maximum(low.abs(), high.abs()) for low, high in map(torch.aminmax, tensors)]  # ten times as fast as the norm


def along(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """The contribution of each index along `dim` to the checksum, int64 [size]; `indices` int64 [size] refer to the full tensor."""
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    others = [other for other in range(bits.dim()) if other != dim]
    sums = bits.sum(dim=others, dtype=torch.int64) if others else bits.long()
    return sums * (2 * indices + 1)


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a full tensor, an int64 scalar on its device."""
    return along(tensor, 0, torch.arange(tensor.shape[0], device=tensor.device)).sum()


def expected(moves: Sequence[Move], sources: Mapping[str, Tensor], lanes: Lanes) -> Tensor:
    """Checksums of the parts that each rank of the new split must get, int64 [moves, ranks], from the training shards.

    Collective over the world; every rank gets all of them.
    """
    ranks = max(len(move.target.shards) for move in moves)
    device = next(iter(sources.values())).device
    sums = torch.zeros(len(moves), ranks, dtype=torch.int64, device=device)
    for row, move in zip(sums, moves, strict=True):
        group = lanes.tp if move.expert_rank is None else lanes.expert_tp
        if not lanes.holds(move) or (len(move.source.shards) == 1 and group.rank()):  # only the first of equal copies counts
            continue
        own = along(sources[move.name], move.dim, _indices(move.source, group.rank(), device))
        for rank in range(ranks):
            for piece in pieces(move.source, move.target, rank, peers=(group.rank(),)):
                row[rank] += own[piece.start : piece.start + piece.length].sum()
    is_expert = torch.tensor([move.expert_rank is not None for move in moves], device=device)
    return sum_over_holders(sums, is_expert, lanes)


def found(moves: Sequence[Move], targets: Mapping[str, Tensor], index: int) -> Tensor:
    """Checksums of the parts that this rank, `index` in the new split, holds: int64 [moves]."""
    sums = []
    for move in moves:
        target = targets[move.name].narrow(move.dim, 0, move.target.size(index))
        sums.append(along(target, move.dim, _indices(move.target, index, target.device)).sum())
    return torch.stack(sums)


def _indices(sharding: Sharding, index: int, device: torch.device) -> Tensor:
    """The indices of the full tensor in a shard, int64, in the shard's order."""
    held = [torch.arange(start, stop, device=device) for start, stop in sharding.held_by(index)]
    return torch.cat(held)


@contextmanager
def negated(chunks: Sequence[LanguageModel]) -> Iterator[None]:
    """In the block all parameters of the policy have the opposite sign. Not while an engine has the policy's place in memory."""
    parameters = {parameter.data_ptr(): parameter.data for chunk in chunks for parameter in chunk.parameters()}  # a tied one once
    torch._foreach_neg_(list(parameters.values()))
    try:
        yield
    finally:
        torch._foreach_neg_(list(parameters.values()))
