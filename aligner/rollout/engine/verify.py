"""Are the weights that an engine holds after a refit finite, and bit for bit what training holds?

A checksum is a sum over a tensor's bit patterns, each times an odd number that says where along the split dimension it belongs, modulo
2^64. So the checksum of a whole is the sum of its parts' however it is split, and one that is in the wrong place is noticed.

`negated` serves the question whether a refit reaches the engine: what is sampled then must be what the negated policy gives.
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
    """Names of tensors with a NaN or an infinity, each with how many; one pass, one answer from the device."""
    named = [(name, tensor.detach()) for name, tensor in tensors.items() if tensor.numel()]
    if not named:
        return []
    finite = torch.stack([largest.isfinite() for largest in magnitudes([tensor for _, tensor in named])])
    bad = [pair for pair, good in zip(named, finite.tolist(), strict=True) if not good]
    return [f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} elements)" for name, tensor in bad]


def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A scalar for each tensor that is finite if all of its elements are; needs no further memory."""
    if tensors[0].is_cuda:
        return list(torch._foreach_norm(tensors, float("inf")))  # fused over all of them
    return [torch.maximum(low.abs(), high.abs()) for low, high in map(torch.aminmax, tensors)]  # ten times as fast as that norm


def along(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """The contribution of each index along `dim` to the checksum, int64 [size]; `indices` int64 [size] are those of the full tensor."""
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    others = [other for other in range(bits.dim()) if other != dim]
    sums = bits.sum(dim=others, dtype=torch.int64) if others else bits.long()
    return sums * (2 * indices + 1)


def checksum(tensor: Tensor) -> Tensor:
    """Of a full tensor: an int64 scalar on its device."""
    return along(tensor, 0, torch.arange(tensor.shape[0], device=tensor.device)).sum()


def expected(moves: Sequence[Move], sources: Mapping[str, Tensor], lanes: Lanes) -> Tensor:
    """Checksum of the part of each tensor that each rank of the new split must get, int64 [moves, ranks], from the training shards.

    Collective over the world; every rank gets all of it.
    """
    ranks = max(len(move.target.shards) for move in moves)
    device = next(iter(sources.values())).device
    sums = torch.zeros(len(moves), ranks, dtype=torch.int64, device=device)
    for row, move in zip(sums, moves, strict=True):
        group = lanes.tp if move.expert_rank is None else lanes.expert_tp
        if not lanes.holds(move) or (len(move.source.shards) == 1 and group.rank()):  # of equal copies the first counts
            continue
        own = along(sources[move.name], move.dim, _indices(move.source, group.rank(), device))
        for rank in range(ranks):
            for piece in pieces(move.source, move.target, rank, peers=(group.rank(),)):
                row[rank] += own[piece.start : piece.start + piece.length].sum()
    is_expert = torch.tensor([move.expert_rank is not None for move in moves], device=device)
    return sum_over_holders(sums, is_expert, lanes)


def found(moves: Sequence[Move], targets: Mapping[str, Tensor], index: int) -> Tensor:
    """Checksum of the part of each tensor that this rank, `index` of the new split, holds: int64 [moves]."""
    sums = []
    for move in moves:
        target = targets[move.name].narrow(move.dim, 0, move.target.size(index))
        sums.append(along(target, move.dim, _indices(move.target, index, target.device)).sum())
    return torch.stack(sums)


def _indices(sharding: Sharding, index: int, device: torch.device) -> Tensor:
    """The indices of the full tensor that a shard holds, int64, in the shard's order."""
    held = [torch.arange(start, stop, device=device) for start, stop in sharding.held_by(index)]
    return torch.cat(held)


@contextmanager
def negated(chunks: Sequence[LanguageModel]) -> Iterator[None]:
    """The policy with the sign of all its parameters turned, which is undone to the bit. Not while an engine has the policy's place."""
    _negate(chunks)
    try:
        yield
    finally:
        _negate(chunks)


@torch.no_grad()
def _negate(chunks: Sequence[LanguageModel]) -> None:
    seen: set[int] = set()
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.data_ptr() not in seen:  # a tied one once
                seen.add(parameter.data_ptr())
                parameter.neg_()
