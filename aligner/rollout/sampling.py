"""Drawing the next token: one pass over the logits, reproducible per sample.

Each draw uses one uniform number that is a pure function of (the sample's seed, the position in its response), so a sample is the same
whatever else is in the batch, and on whichever rank it runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BLOCK = 128  # tokens whose weights are summed first


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of the 64 bits of an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, from int64 seeds and positions: SplitMix64 (Steele et al. 2014) seeded with `seed`, draw `position`."""
    x = seeds + (positions + 1) * _signed(_GOLDEN)  # wraps modulo 2^64, as SplitMix64 wants
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX[1])
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def sample(logits: Tensor, uniform: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: float32 [B, V].
        uniform: float64 [B] in [0, 1); unused where `temperature` is 0 (greedy).
        top_k, top_p: keep the k likeliest tokens / the smallest set of likeliest tokens with at least that mass.

    Returns:
        (tokens int64 [B], logprobs float32 [B]): the log-prob at `temperature` (at 1 for greedy) over the whole vocabulary.
    """
    z = logits / temperature if temperature not in (0.0, 1.0) else logits
    if temperature == 0:
        tokens = z.argmax(dim=-1)
        return tokens, z.gather(1, tokens[:, None])[:, 0] - z.logsumexp(dim=-1)
    peak = z.amax(dim=-1, keepdim=True)
    weights = (z - peak).exp_()
    logsumexp = peak[:, 0] + weights.sum(dim=-1).log()
    if 0 < top_k < z.shape[1]:
        weights = weights * (z >= z.topk(top_k, dim=-1).values[:, -1:])
    if top_p < 1:
        weights = weights * _nucleus(weights, top_p)
    tokens = _invert(weights, uniform)
    return tokens, z.gather(1, tokens[:, None])[:, 0] - logsumexp


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative weight passes `uniform` of the whole; int64 [B]. First the block of tokens, then the token in it:
    a cumulative sum over a large vocabulary in float64 costs several times as much as all the rest of the sampler."""
    if weights.shape[1] <= 8 * BLOCK:
        return _pass(weights.double(), uniform)[0][:, 0]
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).view(weights.shape[0], -1, BLOCK)
    sums = blocks.sum(dim=-1).double()
    block, share = _pass(sums, uniform)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    token, _ = _pass(inside.double(), share)
    return (block * BLOCK + token)[:, 0]


def _pass(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(where the cumulative sum of float64 `weights` [B, N] passes `share` [B] of the total, [B, 1]; how far into that entry, [B])."""
    cumulative = weights.cumsum(dim=-1)
    threshold = (share * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=weights.shape[1] - 1)
    own = weights.gather(1, index)
    return index, ((threshold - cumulative.gather(1, index) + own) / own)[:, 0]


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """True for the smallest set of likeliest tokens whose share of the row's weight reaches top_p (at least one token)."""
    ordered, order = weights.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = before < top_p * ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(keep).scatter(1, order, keep)
