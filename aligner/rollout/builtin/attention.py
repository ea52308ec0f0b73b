"""The paged key-value cache, the plans of a pass over it, and attention over it in plain torch: the reference for every kernel.

A sequence's tokens lie in pages of `page_size` slots, named by its page table: token `t` is in slot `t % page_size` of page
`table[t // page_size]`. Nothing is padded: sequences of any lengths share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aligner.models.modules.windowed_attention import Form, masked, sees
from aligner.models.modules.windowed_attention import attend as windowed_attend


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without waiting for what the device has to do before. On a CPU it is the same memory."""
    tensor = torch.from_numpy(array)
    if not array.size:  # nothing to pin
        return torch.empty(array.shape, dtype=tensor.dtype, device=device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class RecurrentStates(Protocol):
    """What layers without keys and values remember of sequences, by seat: `aligner.rollout.builtin.decode_layers.SeatStates`."""

    def reserve(self, seats: int) -> None: ...

    def clear(self) -> None: ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def at(self, layer: int, seats: Tensor) -> tuple[Tensor, Tensor]: ...

    def put(self, layer: int, seats: Tensor, tails: Tensor, states: Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKV:
    """Keys and values of every layer that has some, [layers, pages, page_size, groups, D] each; if they are recorded, the experts that the
    tokens went to in each layer, `routes` [layers, pages, page_size, k] (`aligner.types.route_dtype`).

    The last page belongs to no sequence: rows that only fill up a batch of a fixed size write there. Slots that hold no token yet hold
    finite numbers: attention weighs them with 0.
    """

    keys: Tensor
    values: Tensor
    routes: Tensor | None = None
    states: RecurrentStates | None = None  # where some layers have no keys and values

    @property
    def tensors(self) -> list[Tensor]:
        """All that a page holds, [layers, pages, ...] each."""
        return [self.keys, self.values] if self.routes is None else [self.keys, self.values, self.routes]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_pages(self) -> int:
        """Pages for sequences: 0 to num_pages - 1."""
        return self.keys.shape[1] - 1

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by slot, [pages * page_size, groups, D]: views."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)

    def clear(self) -> None:
        """As a new cache is: what was there before, of whatever weights, must not come up anywhere."""
        for tensor in self.tensors:
            tensor.zero_()
        if self.states is not None:
            self.states.clear()

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, of all layers."""
        source, target = (upload(np.array(pages, np.int64), self.keys.device) for pages in (sources, targets))
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]

    def routes_of(self, pages: Sequence[int], length: int) -> Tensor:
        """Those of a sequence's first `length` tokens, [length, layers, k], on the host."""
        assert self.routes is not None  # they are recorded
        table = upload(np.array(pages, np.int64), self.routes.device)
        return self.routes[:, table].flatten(1, 2)[:, :length].transpose(0, 1).contiguous().cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence that go into the cache in one pass.

    The first is at position `start`; all before are in the cache, or are of a chunk of the same pass (sequences that share pages).
    `pages` is the sequence's page table, at least up to the last of these tokens; what layers without keys remember of it is at `seat`.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool
    seat: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """One token of each of B sequences: `tokens` int64 [B], their `positions` int64 [B] (as many tokens are in the cache before), and
    `pages` int32 [B, P], the page tables, rows filled up with 0; `seats` int64 [B], where states are kept by seat."""

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    seats: Tensor | None = None

    def slots(self, page_size: int) -> Tensor:
        """Where the tokens go, int64 [B]."""
        page = self.pages.gather(1, (self.positions // page_size)[:, None])[:, 0].long()
        return page * page_size + self.positions % page_size

    def to(self, device: torch.device) -> DecodeBatch:
        """The same on the device."""
        moved = {one.name: x.to(device) for one in fields(self) if (x := getattr(self, one.name)) is not None}
        return DecodeBatch(**moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Chunks from position 0 of similar lengths: one padded attention call. Padding comes after a row's tokens, where a causal
    mask hides it. The indices are made on the host, once for all layers: a mask's would have to be waited for in each."""

    rows: Tensor  # int64 [chunks, longest]: which flat token is there
    kept: tuple[Tensor, Tensor]  # int64 [tokens] each: chunk and column of what is not filling
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
class PrefillPlan:
    """The plan of one pass for every layer: N flat tokens, their positions and slots, and which keys each one attends to."""

    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]
    wanted: Tensor  # int64: flat tokens whose logits are wanted
    parts: tuple[Together | Continued, ...]
    lengths: tuple[int, ...]  # of the chunks, in order
    seats: Tensor  # int64 [chunks]
    continues: Tensor  # bool [chunks]: whether a chunk goes on behind an earlier one


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Where B tokens go and which of the slots that their page tables name they may look at."""

    positions: Tensor  # int64 [B]
    slots: Tensor  # int64 [B]
    pages: Tensor  # int32 [B, P]
    lengths: Tensor  # int32 [B], the own token included
    bounds: tuple[Tensor, Tensor]  # int32 [B + 1] each: where queries and keys would begin, one sequence behind the other
    visible: Tensor  # bool [B, 1, 1, P * page_size]
    seats: Tensor | None  # int64 [B]


class PagedAttention(Protocol):
    """Attention over the pages of one layer, in which the keys and values of the queries' own tokens already are."""

    page_size: int

    def fresh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Sequences that are whole in the pass: [B, S, groups, queries per group, D] to keys and values [B, S, groups, D]."""

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        """One token of each sequence: [B, groups, queries per group, D] -> the same shape."""

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        """The tokens of one chunk: [S, groups, queries per group, D] -> the same shape."""


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
    )


def prefill_attention(
    mixed: tuple[Tensor, Tensor, Tensor], cache: PagedKV, layer: int, plan: PrefillPlan, attention: PagedAttention
) -> Tensor:
    """Causal attention of flat tokens, [N, groups, queries per group, D].

    Args:
        mixed: queries [N, groups, queries per group, D], keys and values [N, groups, D] of the tokens.
        cache: in this layer of it the tokens' keys and values already are.
    """
    queries, keys, values = mixed
    out = torch.empty_like(queries)
    for part in plan.parts:
        if isinstance(part, Together):
            out[part.tokens] = attention.fresh(queries[part.rows], keys[part.rows], values[part.rows])[part.kept]
        else:
            out[part.first : part.last] = attention.prefill(queries[part.first : part.last], cache, layer, part)
    return out


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[B, S, groups, queries per group, D], the last S tokens of the T whose keys and values are [B, T, groups, D]."""
    batch, length, groups, share, size = queries.shape
    q = queries.permute(0, 2, 3, 1, 4).reshape(batch, groups * share, length, size)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    if length == keys.shape[1]:
        out = attend(q, k, v, is_causal=True, enable_gqa=share > 1)
    else:
        places = torch.arange(keys.shape[1], device=q.device)
        # Only kernels without masks take fewer key than query heads; the one that does all else writes the scores out.
        k, v = (tensor.repeat_interleave(share, dim=1) for tensor in (k, v))
        out = attend(q, k, v, attn_mask=places[-length:, None] >= places)
    return out.view(batch, groups, share, length, size).permute(0, 3, 1, 2, 4)


_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """`scaled_dot_product_attention`, on a GPU without cuDNN's kernels: these build a plan for every shape, and decoding has many."""
    if not queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, **options)
    with sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(queries, keys, values, **options)


class GatheredAttention:
    """`PagedAttention` on copies of the pages, anywhere."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def fresh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return causal(queries, keys, values)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        # The queries of a group attend to the same keys: they are the "sequence", and no key is repeated.
        k, v = (tensor[layer][plan.pages].flatten(1, 2).transpose(1, 2) for tensor in (cache.keys, cache.values))
        return attend(queries, k, v, attn_mask=plan.visible)

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        keys, values = (tensor[part.slots][None] for tensor in cache.slots(layer))
        return causal(queries[None], keys, values)[0]


class FormedAttention:
    """`PagedAttention` of layers with a window or chunks, capped scores, sinks [heads] or another scale, on copies of pages, anywhere."""

    def __init__(self, page_size: int, form: Form, scale: float, sinks: Tensor | None = None) -> None:
        self.page_size = page_size
        self._form, self._scale, self._sinks = form, scale, sinks

    def fresh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = queries.flatten(2, 3).transpose(1, 2)
        out = windowed_attend(q, keys.transpose(1, 2), values.transpose(1, 2), self._form, self._scale, self._sinks)
        return out.transpose(1, 2).view(queries.shape)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        k, v = (tensor[layer][plan.pages].flatten(1, 2).transpose(1, 2) for tensor in (cache.keys, cache.values))
        places = torch.arange(k.shape[2], device=k.device)
        visible = sees(plan.positions[:, None], places, self._form)[:, None, None]
        sinks = None if self._sinks is None else self._sinks.view(*queries.shape[1:3], 1)
        return masked(queries, k, v, visible, self._form, self._scale, sinks)

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        keys, values = (tensor[part.slots][None] for tensor in cache.slots(layer))
        return self.fresh(queries[None], keys, values)[0]
