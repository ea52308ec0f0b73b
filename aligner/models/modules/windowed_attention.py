"""Attention whose layers see a window of the past only, or their own chunk, whose scores are capped, or whose heads have a sink: the
trainer's and the engine's.

A token of a layer with window W attends to itself and the W - 1 tokens before it (Beltagy et al. 2020, 2004.05150), one of a layer
with chunks of C positions to itself and those before it in its chunk (Llama 4). Capped scores are cap * tanh(score / cap) (Gemma 2,
2408.00118). A sink is a learned score of a head that counts in its softmax and has no value behind it (gpt-oss, 2508.10925). Queries are
taken a block at a time, each with the keys that its window can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture

BLOCK = 256  # queries at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What differs from plain causal attention: window, chunk, cap on scores (0: none), and whether heads have sinks."""

    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.window or self.chunk or self.softcap or self.sinks)

    def within(self, length: int) -> Form:
        """The same for sequences of at most `length` tokens: a window or chunk that holds them whole has no effect."""
        return replace(self, window=self.window if self.window < length else 0, chunk=self.chunk if self.chunk < length else 0)


def form_of(architecture: Architecture, layer: int) -> Form:
    """The form of a layer, counted from 0."""
    window, chunk = architecture.window_of(layer), architecture.chunk_of(layer)
    return Form(window=window, chunk=chunk, softcap=architecture.attention_softcap, sinks=architecture.attention_sinks)


def attend(query: Tensor, key: Tensor, value: Tensor, form: Form, scale: float, sinks: Tensor | None = None) -> Tensor:
    """A sequence's last queries: [B, heads, L, D] at the positions of the last L of key and value [B, groups, T, D]; `sinks` [heads]."""
    if form.chunk:
        return by_chunk(query, key, value, form.chunk, lambda q, k, v: attend(q, k, v, replace(form, chunk=0), scale, sinks))
    sinks = None if sinks is None else sinks[:, None, None]
    length, total = query.shape[2], key.shape[2]
    key, value = (_for_each_head(x, query.shape[1]) for x in (key, value))
    places = torch.arange(total, device=query.device)
    outs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first, last = total - length + start, total - length + stop
        reach = slice(max(0, first - form.window + 1) if form.window else 0, last)
        visible = sees(places[first:last, None], places[reach], form)
        outs.append(masked(query[:, :, start:stop], key[:, :, reach], value[:, :, reach], visible, form, scale, sinks))
    return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]


def by_chunk(query: Tensor, key: Tensor, value: Tensor, size: int, causal: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """`attend` chunk by chunk: each chunk's queries go to `causal` with the keys and values of the chunk, so nothing is masked."""
    total = key.shape[2]
    first = total - query.shape[2]
    outs = []
    for start in range(first - first % size, total, size):
        stop = min(start + size, total)
        own = slice(max(start - first, 0), stop - first)
        outs.append(causal(query[:, :, own], key[:, :, start:stop], value[:, :, start:stop]))
    return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose attention without sinks begins with that of [B, heads, L, D] and [B, groups, T, D] with `sinks`
    [heads]: for kernels, which write no scores out.

    One more key comes first, whose value is 0. Further dimensions of a query mark its head in the group; there that key has the heads'
    sinks, in two parts, the second of which is what the type rounds off the first.
    """
    share = query.shape[1] // key.shape[1]
    exact = (sinks.float() / scale).view(-1, share)
    rounded = exact.detach().to(key.dtype)
    parts = torch.cat([rounded, (exact - rounded).to(key.dtype)], dim=-1)
    first = F.pad(parts, (key.shape[-1], 0))[None, :, None].expand(len(key), -1, 1, -1)
    whose = torch.eye(share, dtype=query.dtype, device=query.device).repeat(key.shape[1], 2)[None, :, None]
    query = torch.cat([query, whose.expand(*query.shape[:3], -1)], dim=-1)
    return query, torch.cat([first, F.pad(key, (0, 2 * share))], dim=2), F.pad(value, (0, 2 * share, 1, 0))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """[B, heads, T, D] of [B, groups, T, D]; a view where there is one group."""
    groups = x.shape[1]
    return x.expand(-1, heads, -1, -1) if groups == 1 else x.repeat_interleave(heads // groups, dim=1) if groups < heads else x


def sees(queries: Tensor, keys: Tensor, form: Form) -> Tensor:
    """Whether the queries at these positions attend to the keys at those."""
    past = keys <= queries
    if form.chunk:
        past = past & (keys // form.chunk == queries // form.chunk)
    return past & (keys > queries - form.window) if form.window else past


def masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, form: Form, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Attention to keys that bool `visible` allows, which broadcasts to [B, heads, L, T], as `sinks` do to [B, heads, L, 1]."""
    if not form.softcap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
    scores = query @ key.transpose(-1, -2) * (scale / (form.softcap or 1))
    if form.softcap:
        scores = form.softcap * torch.tanh(scores)
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value
