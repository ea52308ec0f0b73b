"""The paged key-value cache, the plans of a pass over it, and attention over it in plain torch: the reference for every kernel.

A sequence's tokens lie in pages of `page_size` slots, named by its page table: token `t` is in slot `t % page_size` of page
`table[t // page_size]`. Nothing is padded: sequences of any lengths share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aligner.models.config import Architecture
from aligner.models.modules.windowed_attention import Form, attend as windowed_attend, masked, sees
from aligner.rollout.builtin.quantized import decoded, encoded, scales_of


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without waiting for the device's earlier work. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if not array.size:  # nothing to pin
        return torch.empty(array.shape, dtype=tensor.dtype, device=device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class SeatStates:
    """What an architecture's delta nets remember of sequences, by seat and not in pages, on one of `ranks` that share the heads.

    This is the end of the convolution's window and the state of every head, whatever the sequence's length. It cannot be cut back or read
    in the middle, so beginnings of prompts are not shared: a group's prompt is computed at the seat of its first response and copied to the
    seats of the others.
    """

    def __init__(self, architecture: Architecture, ranks: int, weight: Tensor) -> None:
        a, heads = architecture, architecture.linear_value_heads // ranks
        channels = 2 * a.linear_key_heads * a.linear_key_head_dim // ranks + heads * a.linear_value_head_dim
        shapes = (a.linear_conv_size - 1, channels), (heads, a.linear_key_head_dim, a.linear_value_head_dim)
        layers = len(a.linear_attention_layers)
        self._tensors = [
            torch.zeros((layers, 0, *shape), dtype=dtype, device=weight.device)
            for shape, dtype in zip(shapes, (weight.dtype, torch.float32), strict=True)
        ]

    def reserve(self, seats: int) -> None:
        """Provide at least this many seats; existing ones keep their contents."""
        if (missing := seats - self._tensors[0].shape[1]) > 0:
            self._tensors = [torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], dim=1) for x in self._tensors]

    def clear(self) -> None:
        for tensor in self._tensors:
            tensor.zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = (upload(np.array(seats, np.int64), self._tensors[0].device) for seats in (sources, targets))
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]

    def at(self, layer: int, seats: Tensor) -> tuple[Tensor, Tensor]:
        """The windows' ends [N, W - 1, channels] and the states float32 [N, heads, K, V] of the delta net with this number."""
        tails, states = (tensor[layer][seats] for tensor in self._tensors)
        return tails, states

    def put(self, layer: int, seats: Tensor, tails: Tensor, states: Tensor) -> None:
        """The inverse of `at`."""
        for tensor, new in zip(self._tensors, (tails, states), strict=True):
            tensor[layer].index_copy_(0, seats, new)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKV:
    """Keys and values of every layer that has some, [layers, pages, page_size, groups, D] each, and `routes` [layers, pages, page_size, k]
    (`aligner.types.route_dtype`): the experts of each token in each layer, if recorded.

    The last page belongs to no sequence: rows that only fill up a batch of a fixed size write there. Slots without a token hold finite
    numbers, which attention weighs with 0.

    With `scales` keys and values are codes (`aligner.rollout.builtin.quantized`), and these have their scales [layers, pages, page_size,
    groups, 1], in the dtype of the numbers.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    routes: Tensor | None = None
    states: SeatStates | None = None  # where some layers have no keys and values

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that pages hold, [layers, pages, ...] each."""
        return [self.keys, self.values, *(self.scales or ()), *(() if self.routes is None else (self.routes,))]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_pages(self) -> int:
        """Pages for sequences: 0 to num_pages - 1. The one behind them belongs to none."""
        return self.keys.shape[1] - 1

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by slot, [pages * page_size, groups, D]: views."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)

    def put(self, layer: int, slots: Tensor, mixed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write tokens' keys and values [N, groups, D]; returns them as the cache has them."""
        if self.scales is None:
            for place, own in zip(self.slots(layer), mixed, strict=True):
                place.index_copy_(0, slots, own)
            return mixed
        kept = []
        for place, scales, own in zip(self.slots(layer), self.scales, mixed, strict=True):
            factors = scales_of(own, place.dtype, dtype=scales.dtype)
            codes = encoded(own, factors, place.dtype)
            place.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
            scales[layer].flatten(0, 1).index_copy_(0, slots, factors)
            kept.append(decoded(codes, factors))
        return kept[0], kept[1]

    def read(self, layer: int, index: Tensor, *, by_slot: bool = False) -> tuple[Tensor, Tensor]:
        """Copies of keys and values in the pages `index` of a layer, [*index, page_size, groups, D]; or in slots, [*index, groups, D]."""

        def taken(tensor: Tensor) -> Tensor:
            return (tensor[layer].flatten(0, 1) if by_slot else tensor[layer])[index]

        if self.scales is None:
            return taken(self.keys), taken(self.values)
        return decoded(taken(self.keys), taken(self.scales[0])), decoded(taken(self.values), taken(self.scales[1]))

    def clear(self) -> None:
        """Empty the cache: results of earlier weights must not come up anywhere."""
        for tensor in self.tensors:
            tensor.zero_()
        if self.states is not None:
            self.states.clear()

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = (upload(np.array(pages, np.int64), self.keys.device) for pages in (sources, targets))
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]

    def routes_of(self, pages: Sequence[int], length: int) -> Tensor:
        """The routes of a sequence's first `length` tokens, [length, layers, k], on the host."""
        assert self.routes is not None  # they are recorded
        table = upload(np.array(pages, np.int64), self.routes.device)
        return self.routes[:, table].flatten(1, 2)[:, :length].transpose(0, 1).contiguous().cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenChunk:
    """The images in a chunk of a prompt that has some."""

    axes: np.ndarray  # int64 [3, tokens]: positions in time, height and width
    slots: np.ndarray  # int64 [slots]: the tokens of the chunk in whose places features come
    features: Tensor | None  # [1 + deep layers, slots, H]: what stands there, and what is added behind each of the first layers


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence that go into the cache in one pass.

    The first is at position `start`; all earlier ones are in the cache or in a chunk of the same pass (sequences that share pages).
    `pages` is the sequence's page table, at least up to the last of these tokens; `seat` is for layers that remember it without keys.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool
    seat: int = 0
    seen: SeenChunk | None = None  # then slots of images hold any token


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """One token of each of B sequences: `tokens` int64 [B]; their `positions` int64 [B], the numbers of tokens in the cache before them;
    `pages` int32 [B, P], the page tables, padded with 0; `seats` int64 [B], if states are kept by seat; `rotary` int64 [B], the positions
    that rotate, if they are others: behind an image they are behind."""

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    seats: Tensor | None = None
    rotary: Tensor | None = None

    def slots(self, page_size: int) -> Tensor:
        """Where the tokens go, int64 [B]."""
        page = self.pages.gather(1, (self.positions // page_size)[:, None])[:, 0].long()
        return page * page_size + self.positions % page_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Chunks from position 0 of similar lengths: one padded attention call. The indices are made on the host, once for all layers."""

    rows: Tensor  # int64 [chunks, longest]: which flat token is there
    kept: tuple[Tensor, Tensor]  # int64 [tokens] each: chunk and column of the real tokens
    tokens: Tensor  # int64 [tokens]: which flat token that is


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A chunk that looks back into the cache: flat tokens `first` to `last`, the last ones of a sequence of `length`."""

    first: int
    last: int
    slots: Tensor  # int64 [length]: where the sequence's tokens are in the cache, its own included
    pages: Tensor  # int32 [1, P]
    lengths: Tensor  # int32 [1]: of the sequence
    bounds: tuple[Tensor, Tensor]  # int32 [2] each: 0 and how many queries and keys there are


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenTokens:
    """The images among the flat tokens of a pass, as in `SeenChunk`."""

    axes: Tensor  # int64 [3, N]
    slots: Tensor  # int64 [slots]
    features: Tensor | None  # [1 + deep layers, slots, H]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """The plan of one pass for every layer: N flat tokens, their positions and slots, and the keys that each one attends to."""

    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]
    wanted: Tensor  # int64: flat tokens whose logits are wanted
    parts: tuple[Together | Continued, ...]
    lengths: tuple[int, ...]  # of the chunks, in order
    seats: Tensor  # int64 [chunks]
    continues: Tensor  # bool [chunks]: whether a chunk continues an earlier one
    seen: SeenTokens | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Where B tokens go, and which slots of their page tables they attend to."""

    positions: Tensor  # int64 [B]
    slots: Tensor  # int64 [B]
    pages: Tensor  # int32 [B, P]
    lengths: Tensor  # int32 [B], with the token itself
    bounds: tuple[Tensor, Tensor]  # int32 [B + 1] each: where the queries and keys of each sequence begin, laid one after the other
    visible: Tensor  # bool [B, 1, 1, P * page_size]
    seats: Tensor | None  # int64 [B]
    rotary: Tensor | None = None  # int64 [B]


def plan_prefill(chunks: Sequence[PrefillChunk], page_size: int, device: torch.device) -> PrefillPlan:
    """Lay the chunks' tokens one after the other."""
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    wanted: list[int] = []
    fresh: dict[int, list[tuple[int, int]]] = {}
    parts: list[Together | Continued] = []
    for chunk in chunks:
        first, end = len(tokens), chunk.start + len(chunk.tokens)
        places, pages = np.arange(end), np.array(chunk.pages, np.int32)
        table = pages[places // page_size].astype(np.int64) * page_size + places % page_size
        tokens += chunk.tokens
        positions.append(places[chunk.start :])
        slots.append(table[chunk.start :])
        if chunk.wants_logits:
            wanted.append(len(tokens) - 1)
        if chunk.start:
            parts.append(
                Continued(
                    first=first,
                    last=len(tokens),
                    slots=upload(table, device),
                    pages=upload(pages[None], device),
                    lengths=upload(np.array([end], np.int32), device),
                    bounds=tuple(upload(np.array([0, count], np.int32), device) for count in (len(chunk.tokens), end)),
                )
            )
        else:  # lengths between the same powers of two share a call
            fresh.setdefault(len(chunk.tokens).bit_length(), []).append((first, len(chunk.tokens)))
    parts += [_together(rows, device) for rows in fresh.values()]
    lists = np.array(tokens, np.int64), np.concatenate(positions), np.concatenate(slots), np.array(wanted, np.int64)
    flat, where, slot, last = (upload(values, device) for values in lists)
    return PrefillPlan(
        tokens=flat,
        positions=where,
        slots=slot,
        wanted=last,
        parts=tuple(parts),
        lengths=tuple(len(chunk.tokens) for chunk in chunks),
        seats=upload(np.array([chunk.seat for chunk in chunks], np.int64), device),
        continues=upload(np.array([chunk.start > 0 for chunk in chunks]), device),
        seen=_seen(chunks, positions, device),
    )


def _seen(chunks: Sequence[PrefillChunk], positions: Sequence[np.ndarray], device: torch.device) -> SeenTokens | None:
    if not any(chunk.seen for chunk in chunks):
        return None
    firsts = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
    axes = [
        np.broadcast_to(own, (3, len(own))) if chunk.seen is None else chunk.seen.axes for chunk, own in zip(chunks, positions, strict=True)
    ]
    slots = [first + chunk.seen.slots for chunk, first in zip(chunks, firsts, strict=False) if chunk.seen]
    features = [chunk.seen.features for chunk in chunks if chunk.seen and chunk.seen.features is not None]
    return SeenTokens(
        axes=upload(np.concatenate(axes, axis=1), device),
        slots=upload(np.concatenate(slots), device),
        features=torch.cat(features, dim=1) if features else None,
    )


def _together(rows: list[tuple[int, int]], device: torch.device) -> Together:
    first, length = np.array(rows, np.int64).T
    column = np.arange(length.max())
    grid = first[:, None] + np.minimum(column, length[:, None] - 1)
    chunk, place = (column < length[:, None]).nonzero()
    return Together(
        rows=upload(grid, device), kept=(upload(chunk, device), upload(place, device)), tokens=upload(grid[chunk, place], device)
    )


def plan_decode(batch: DecodeBatch, page_size: int) -> DecodePlan:
    """Slots and masks of a decode step, the same for every layer."""
    pages, positions = batch.pages, batch.positions
    places = torch.arange(pages.shape[1] * page_size, device=pages.device)
    lengths = (positions + 1).int()
    begins = torch.arange(len(lengths) + 1, dtype=torch.int32, device=pages.device)
    return DecodePlan(
        positions=positions,
        slots=batch.slots(page_size),
        pages=pages,
        lengths=lengths,
        bounds=(begins, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))),
        visible=(places <= positions[:, None])[:, None, None],
        seats=batch.seats,
        rotary=batch.rotary,
    )


def prefill_attention(
    mixed: tuple[Tensor, Tensor, Tensor], cache: PagedKV, layer: int, plan: PrefillPlan, attention: GatheredAttention
) -> Tensor:
    """Causal attention of flat tokens, [N, groups, queries per group, D].

    Args:
        mixed: queries [N, groups, queries per group, D], keys and values [N, groups, D] of the tokens.
        cache: already has the tokens' keys and values in this layer.
    """
    queries, keys, values = mixed
    out = torch.empty_like(queries)
    for part in plan.parts:
        if isinstance(part, Together):
            out[part.tokens] = attention.fresh(queries[part.rows], keys[part.rows], values[part.rows])[part.kept]
        else:
            out[part.first : part.last] = attention.prefill(queries[part.first : part.last], cache, layer, part)
    return out


_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """`scaled_dot_product_attention`, on a GPU without cuDNN's kernels, which build a plan for every shape: decoding has many shapes."""
    if not queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, **options)
    with sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(queries, keys, values, **options)


class GatheredAttention:
    """Attention over the pages of one layer, on copies, on any device. Subclasses attend in another form, or where the pages lie."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def fresh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The last S tokens of sequences: [B, S, groups, queries per group, D] to keys and values [B, T, groups, D]."""
        q = queries.flatten(2, 3).transpose(1, 2)
        return self._causal(q, keys.transpose(1, 2), values.transpose(1, 2)).transpose(1, 2).view(queries.shape)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, heads, S, D], the last S tokens of the T whose keys and values are [B, groups, T, D]."""
        length, share = q.shape[2], q.shape[1] // k.shape[1]
        if length == k.shape[2]:
            return attend(q, k, v, is_causal=True, enable_gqa=share > 1)
        places = torch.arange(k.shape[2], device=q.device)
        # Only kernels without masks accept fewer key heads than query heads; the general kernel writes the scores out.
        k, v = (tensor.repeat_interleave(share, dim=1) for tensor in (k, v))
        return attend(q, k, v, attn_mask=places[-length:, None] >= places)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        """One token of each sequence: [B, groups, queries per group, D] -> the same shape."""
        # The queries of a group attend to the same keys: they are the "sequence", and no key is repeated.
        return attend(queries, *gathered(cache, layer, plan), attn_mask=plan.visible)

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        """The tokens of one chunk: [S, groups, queries per group, D] -> the same shape."""
        keys, values = cache.read(layer, part.slots, by_slot=True)
        return self.fresh(queries[None], keys[None], values[None])[0]


def gathered(cache: PagedKV, layer: int, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Keys and values [B, groups, P * page_size, D] of the pages that a decode step looks at."""
    keys, values = (tensor.flatten(1, 2).transpose(1, 2) for tensor in cache.read(layer, plan.pages))
    return keys, values


class FormedAttention(GatheredAttention):
    """Layers with a window or chunks, capped scores, sinks [heads] or another scale."""

    def __init__(self, page_size: int, form: Form, scale: float, sinks: Tensor | None = None) -> None:
        super().__init__(page_size)
        self._form, self._scale, self._sinks = form, scale, sinks

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return windowed_attend(q, k, v, self._form, self._scale, self._sinks)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        k, v = gathered(cache, layer, plan)
        places = torch.arange(k.shape[2], device=k.device)
        visible = sees(plan.positions[:, None], places, self._form)[:, None, None]
        sinks = None if self._sinks is None else self._sinks.view(*queries.shape[1:3], 1)
        return masked(queries, k, v, visible, self._form, self._scale, sinks)
