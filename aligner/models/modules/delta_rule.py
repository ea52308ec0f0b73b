"""The gated delta rule (Yang et al. 2024, 2412.06464) and the causal convolution before it, over sequences that lie one after the other.

Every head has a state S [K, V]. A token with key k, value v, decay g <= 0 and rate b changes it to S' = exp(g) S + b k (v - exp(g) k S)^T;
its output is q S'. Tokens are taken a chunk at a time: within a chunk the changes are the solution of one triangular system (the paper's
section 3.3), from chunk to chunk the state is handed on. All sequences advance together, so a row of packed sequences takes as many steps
as its longest one has chunks, and no state crosses from one sequence to the next.

All is computed in float32. Plain torch; the formulation is that of transformers' `torch_chunk_gated_delta_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.types.rows import upload

CHUNK = 64  # tokens, at most
_EPSILON = 1e-6  # of the norm of queries and keys


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return upload(torch.tensor(array), device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What a delta net makes of T tokens: `query`, `key` [T, heads, K], `value` [T, heads, V], `decay` (its logarithm) and `rate`
    [T, heads]; one query and key for each head of values."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor

    def normed(self) -> Tokens:
        """In float32, queries and keys of length 1, queries then over sqrt(K)."""
        query, key, value, decay, rate = (x.float() for x in (self.query, self.key, self.value, self.decay, self.rate))
        query, key = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPSILON) for x in (query, key))
        return Tokens(query=query * query.shape[-1] ** -0.5, key=key, value=value, decay=decay, rate=rate)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Chunks in the order in which they are computed: the first of every sequence, the second of every one that has two, ..."""

    places: np.ndarray  # int64 [chunks, size]: which token is there; T: none
    counts: tuple[int, ...]  # chunks of each round
    order: np.ndarray  # int64 [N]: the sequences, those with most chunks first
    back: np.ndarray  # int64 [T]: where in [chunks * size] each token is


@lru_cache(maxsize=8)  # the layers of a pass ask for the same
def _plan(lengths: tuple[int, ...]) -> _Plan:
    size, total = min(CHUNK, max(lengths)), sum(lengths)
    chunks = np.array([-(-length // size) for length in lengths])
    starts = np.cumsum([0, *lengths[:-1]])
    order = np.argsort(-chunks, kind="stable")
    places, counts = [], []
    for number in range(int(chunks.max())):
        running = order[chunks[order] > number]
        within = number * size + np.arange(size)
        places.append(np.where(within < np.array(lengths)[running, None], starts[running, None] + within, total))
        counts.append(len(running))
    grid = np.concatenate(places)
    back = np.empty(total + 1, np.int64)
    back[grid.reshape(-1)] = np.arange(grid.size)
    return _Plan(grid, tuple(counts), order, back[:total])


def chunked(tokens: Tokens, lengths: Sequence[int], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The outputs [T, heads, V], and the states [N, heads, K, V] behind the N sequences, whose `lengths` (at least 1) sum to T.

    `state` [N, heads, K, V]: in front of them; None: zeros.
    """
    plan, device = _plan(tuple(lengths)), tokens.value.device
    places = _on(plan.places, device)
    x = tokens.normed()
    # [chunks, heads, size, ...]; where a chunk has no token left, zeros, which change no state.
    query, key, value, decay, rate = (
        torch.cat([one, one.new_zeros(1, *one.shape[1:])])[places].transpose(1, 2) for one in (x.query, x.key, x.value, x.decay, x.rate)
    )
    since = decay.cumsum(dim=-1)  # the chunk's first token, decay by decay
    later = torch.ones(places.shape[1], places.shape[1], dtype=torch.bool, device=device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    rated = key * rate[..., None]
    system = (rated @ key.transpose(-1, -2)) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * rate[..., None], rated * since[..., None].exp()], dim=-1), upper=False, unitriangular=True
    )
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * between
    parts = (
        written,
        read,
        scores,
        query * since[..., None].exp(),
        (key * (since[..., -1:] - since)[..., None].exp()).transpose(-1, -2),
        since[..., -1].exp()[..., None, None],
    )
    order = _on(plan.order, device)
    if state is None:
        state = value.new_zeros(len(lengths), value.shape[1], key.shape[-1], value.shape[-1])
    else:
        state = state.float()[order]
    out, state = _scan(parts, plan.counts, state)
    outputs = out.transpose(1, 2).flatten(0, 1)[_on(plan.back, device)]
    return outputs.to(tokens.value.dtype), state[order.argsort()]


def _scan(parts: tuple[Tensor, ...], counts: Sequence[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Hand the states on from round to round: (outputs of all chunks, the states behind the last ones)."""
    outs, ended = [], []
    for written, read, scores, query, key, decay in zip(*(part.split(counts) for part in parts), strict=True):
        ended.append(state[len(written) :])
        state = state[: len(written)]
        new = written - read @ state
        outs.append(query @ state + scores @ new)
        state = state * decay + key @ new
    return torch.cat(outs), torch.cat([state, *reversed(ended)])


def step(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of T sequences: the outputs [T, heads, V] and the states behind them, of those before, float32 [T, heads, K, V]."""
    x = tokens.normed()
    state = state * x.decay.exp()[..., None, None]
    change = (x.value - (x.key[..., None, :] @ state).squeeze(-2)) * x.rate[..., None]
    state = state + x.key[..., :, None] * change[..., None, :]
    return (x.query[..., None, :] @ state).squeeze(-2).to(tokens.value.dtype), state


@lru_cache(maxsize=8)
def _windows(lengths: tuple[int, ...], tail: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of rows [N tails of `tail` rows; T tokens]: every sequence behind its tail; where each token's output is; each one's next tail."""
    behind, outputs, tails, count, start, place = [], [], [], len(lengths), len(lengths) * tail, 0
    for number, length in enumerate(lengths):
        rows = np.concatenate([number * tail + np.arange(tail), start + np.arange(length)])
        behind.append(rows)
        tails.append(rows[length:])
        outputs.append(place + np.arange(length))
        start, place = start + length, place + length + tail
    return np.concatenate(behind), np.concatenate(outputs), np.concatenate(tails).reshape(count, tail)


def convolved(x: Tensor, weight: Tensor, lengths: Sequence[int], tails: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each channel's causal convolution within its sequence: [T, C] of x [T, C] and weight [C, W]; and each sequence's last W - 1 rows,
    [N, W - 1, C], which are the `tails` of their continuations. None: zeros, as in front of a sequence's first token."""
    channels, tail = x.shape[1], weight.shape[1] - 1
    if tails is None:
        tails = x.new_zeros(len(lengths), tail, channels)
    behind, outputs, last = (_on(one, x.device) for one in _windows(tuple(lengths), tail))
    rows = torch.cat([tails.flatten(0, 1).to(x.dtype), x])
    out = F.conv1d(rows[behind].t()[None], weight[:, None], groups=channels)[0].t()
    return out[outputs], rows[last]
