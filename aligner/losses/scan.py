"""Discounted sums along a sequence without a step per token: triangular products within blocks, then between them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32  # a product costs BLOCK multiplications per token; the blocks of 1,024 tokens are then one block themselves


def discounted_sums(x: Tensor, decay: float) -> Tensor:
    """y[b, t] = sum over s >= t of decay^(s - t) x[b, s], for floats x [B, S] and decay >= 0 (0: x itself); of x's dtype."""
    rows, length = x.shape
    if length <= BLOCK:
        return x @ _powers(length, decay, x)
    blocks = -(-length // BLOCK)
    padded = x if length == blocks * BLOCK else pad(x, (0, blocks * BLOCK - length))
    sums = (padded.reshape(rows * blocks, BLOCK) @ _powers(BLOCK, decay, x)).view(rows, blocks, BLOCK)
    # What a block's first token sees is what all tokens of the block before it see, discounted by their distance from it.
    onwards = discounted_sums(sums[:, :, 0], decay**BLOCK)
    fade = decay ** torch.arange(BLOCK, 0, -1, dtype=torch.float64, device=x.device)
    sums.addcmul_(pad(onwards[:, 1:], (0, 1))[:, :, None], fade.to(x.dtype))
    return sums.view(rows, blocks * BLOCK)[:, :length]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """decay^(s - t) at [s, t] for s >= t, else 0: [size, size], made in float64."""
    at = torch.arange(size, dtype=torch.float64, device=like.device)
    distance = at[:, None] - at[None, :]
    return torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(like.dtype)
