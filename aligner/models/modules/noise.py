"""Noise on the embeddings of training passes (NEFTune; Jain et al. 2023, 2310.05914): each number of a token's embedding gets a uniform one
from +-alpha / sqrt(L d), L being the tokens of its own row and d the embedding's width.

A number is a hash of seed, update, row of the batch, position and place in the embedding. So no generator has a state to save, and every
layout, micro-batch size and packing adds the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.parallel import platform
from aligner.types.rows import upload

_BITS = 24  # of a hash, as many as float32 has
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # between two states of SplitMix64
_MIXES = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """That of a micro-batch's slots on this rank."""

    keys: Tensor  # int64 [rows, L]
    bounds: Tensor  # float32 [rows, L]: alpha / sqrt(tokens of the row); 0 where a slot has no token

    def added(self, embedded: Tensor) -> Tensor:
        """Embeddings [rows, L, d] with their noise."""
        width = embedded.shape[-1]
        numbers = hashed(self.keys[..., None] + torch.arange(1, width + 1, device=embedded.device) * GOLDEN)
        uniform = (shifted(numbers, 64 - _BITS).float() + 0.5) / 2 ** (_BITS - 1) - 1
        return embedded + (uniform * (self.bounds / math.sqrt(width))[..., None]).to(embedded.dtype)

    def part(self, rank: int, size: int) -> Noise:
        """Of the slots that sequence parallelism leaves to a rank."""
        keys, bounds = (tensor.chunk(size, dim=1)[rank] for tensor in (self.keys, self.bounds))
        return Noise(keys=keys, bounds=bounds)


def noise_of(token_of: Tensor, lengths: Tensor, rows: Sequence[int], *, width: int, alpha: float, seed: Sequence[int]) -> Noise:
    """The noise of slots that hold the tokens `token_of` (flat numbers in the micro-batch's [rows, width]; -1: none).

    `lengths` are the rows' tokens, `rows` their numbers in the whole batch. `seed`: what differs between runs, and updates.
    """
    row, position = token_of.clamp(min=0) // width, token_of % width
    keys = torch.zeros_like(token_of)
    for numbers in (*seed, torch.tensor(rows)[row], position):
        keys = hashed(keys + GOLDEN + numbers)
    bounds = torch.where(token_of >= 0, alpha / lengths[row].float().sqrt(), 0.0)
    return Noise(keys=upload(keys, platform.device()), bounds=upload(bounds, platform.device()))


def hashed(numbers: Tensor) -> Tensor:
    """SplitMix64's output (Steele et al. 2014) for each of these states of 64 bits; products wrap around."""
    for shift, factor in _MIXES:
        numbers = (numbers ^ shifted(numbers, shift)) * factor
    return numbers


def shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
