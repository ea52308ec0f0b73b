"""The positions of a micro-batch's tokens in the model's input on this rank: padded or packed, whole or a context-parallel part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.modules.shared_prompts import Segment, SegmentedPackedSeqParams, key_spans, local_segments, segments_of
from aligner.parallel.context import local_slots
from aligner.parallel.mcore import PackedSeqParams
from aligner.types import Batch, no_expert
from aligner.types.rows import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """By how many ranks sequences are split, and how micro-batches are shaped."""

    cp_rank: int = 0
    cp_size: int = 1
    sequence_parallel_size: int = 1  # tp, where it splits the sequence too
    packed: bool = False
    token_multiple: int = 1  # of the tokens on each rank: 8-bit products need one (`fp8_token_multiple`)
    segmented: bool = False  # packed rows are described to our own core attention, on the host
    share_prompts: bool = False  # packed rows with the same prompt have it once: see `aligner.models.modules.shared_prompts`
    fixed_tokens: int = 0  # if not 0: every packed micro-batch is padded to this number of tokens, for buffers of one shape

    @property
    def row_multiple(self) -> int:
        """The length of every row must be a multiple of this."""
        context = 2 * self.cp_size if self.cp_size > 1 else 1
        return context if self.packed else math.lcm(context, self._ranks * self.token_multiple)

    @property
    def total_multiple(self) -> int:
        """The length of the model's input must be a multiple of this."""
        return math.lcm(self.row_multiple, self._ranks * self.token_multiple)

    @property
    def _ranks(self) -> int:
        return self.cp_size * self.sequence_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The model's input on this rank, [rows, L] slots, and what each slot holds.

    `token_of` and `next_token_of` are flat positions (row * S + t) in the micro-batch's [B, S] tensors: of the slot's own token, and of the
    token that its hidden state predicts; -1 for no token (padding, and the last token of a sequence). They stay on the host, which chooses
    by them what is projected.
    """

    tokens: Tensor  # int64 [rows, L]
    positions: Tensor  # int64 [rows, L], each within its own sequence
    token_of: Tensor  # int64 [rows, L]
    next_token_of: Tensor  # int64 [rows, L]
    packed: PackedSeqParams | None  # Megatron-Core's description of a packed row
    whole_shape: tuple[int, int]  # of the input over all context-parallel ranks

    @property
    def padding(self) -> Tensor:
        """Bool [rows, L], True where a slot holds no token; where the tokens are."""
        return upload(self.token_of < 0, self.tokens.device)

    def to(self, device: torch.device) -> Placement:
        """The same with the model's input on `device`."""
        tensors = {name: upload(getattr(self, name), device) for name in ("tokens", "positions")}
        packed = self.packed
        if packed is not None:
            starts = None if packed.cu_seqlens_q is None else upload(packed.cu_seqlens_q, device)
            packed = replace(packed, cu_seqlens_q=starts, cu_seqlens_kv=starts)
            if isinstance(packed, SegmentedPackedSeqParams):
                packed = replace(packed, positions=tensors["positions"].flatten(), spans=packed.spans.to(device))
        return replace(self, packed=packed, **tensors)


def place(batch: Batch, splits: Splits, *, shape: tuple[int, int] | None = None) -> Placement:
    """Lay a micro-batch out. `shape` is that of the whole input where it must not depend on the batch (pipelines send fixed shapes)."""
    segments = segments_of(batch, share=splits.share_prompts) if splits.packed else []
    rows, length = shape or input_shape(input_lengths(batch, splits), splits)
    bounds = _packed_bounds([segment.size for segment in segments], splits, length) if splits.packed else [0, length]
    spans = list(pairwise(bounds))
    whole = _packed_slots(batch, segments, spans) if splits.packed else _padded_slots(batch, rows, length)
    token_of, next_token_of, positions = whole
    if splits.cp_size > 1:
        slots = torch.cat([start + local_slots(stop - start, splits.cp_rank, splits.cp_size) for start, stop in spans]).to(token_of.device)
        token_of, next_token_of, positions = (x[:, slots] for x in (token_of, next_token_of, positions))
    packed = None
    if splits.packed:
        starts = torch.tensor(bounds, dtype=torch.int32, device=batch.tokens.device)
        longest = max(stop - start for start, stop in spans)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        if splits.segmented or splits.share_prompts:
            own = local_segments(segments, bounds, splits.cp_size)
            described = {"segments": tuple(own), "positions": positions.flatten(), "spans": key_spans(own, splits.cp_rank, splits.cp_size)}
            packed = SegmentedPackedSeqParams(qkv_format="thd", max_seqlen_q=length, max_seqlen_kv=length, **described)
        if splits.share_prompts and not splits.segmented:  # Transformer Engine's rotary embedding needs a sequence
            packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, length], dtype=torch.int32)
    tokens = torch.where(token_of >= 0, batch.tokens.reshape(-1)[token_of.clamp(min=0)], 0)
    return Placement(
        tokens=tokens, positions=positions, token_of=token_of, next_token_of=next_token_of, packed=packed, whole_shape=(rows, length)
    )


def in_slots(routes: Tensor, placement: Placement) -> Tensor:
    """Routes [B, S, layers, k] of a micro-batch's tokens where these lie: [L, rows, layers, k], `no_expert` in empty slots."""
    token_of = placement.token_of.t()
    found = routes.flatten(0, 1)[token_of.clamp(min=0)]
    found[token_of < 0] = no_expert(routes.dtype)
    return found


def input_lengths(batch: Batch, splits: Splits) -> list[int]:
    """Lengths of what lies one beside (or after) the other in the model's input: rows, or parts of them where prompts are shared."""
    if not splits.share_prompts:
        return batch.lengths.tolist()
    return [segment.size for segment in segments_of(batch, share=True)]


def input_shape(lengths: list[int], splits: Splits) -> tuple[int, int]:
    """(rows, length) of the model's input over all context-parallel ranks for `input_lengths`.

    Raises ConfigError where a micro-batch is larger than a size that is fixed.
    """
    if splits.packed:
        total = sum(_round_up(length, splits.row_multiple) for length in lengths)
        if total > splits.fixed_tokens > 0:
            raise ConfigError(
                f"model.micro_batch_tokens={splits.fixed_tokens}: sequences that must share a micro-batch have {total} tokens together, "
                "and parallel.tp_comm_overlap allows no larger one"
            )
        return 1, _round_up(max(total, splits.fixed_tokens), splits.total_multiple)
    return len(lengths), _round_up(max(lengths), splits.row_multiple)


def _padded_slots(batch: Batch, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    b, s = batch.tokens.shape
    device = batch.tokens.device
    t = torch.arange(length, device=device).expand(rows, length)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    lengths[:b] = batch.lengths
    token_of = torch.arange(rows, device=device)[:, None] * s + t
    next_token_of = torch.where(t + 1 < lengths[:, None], token_of + 1, -1)
    return torch.where(t < lengths[:, None], token_of, -1), next_token_of, t


def _packed_slots(batch: Batch, segments: Sequence[Segment], spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    s, length = batch.tokens.shape[1], spans[-1][1]
    token_of = torch.full((1, length), -1, dtype=torch.int64)
    next_token_of, positions = token_of.clone(), torch.zeros(1, length, dtype=torch.int64)
    lengths = batch.lengths.tolist()
    for number, (start, stop) in enumerate(spans):
        if number == len(segments):  # the filler
            positions[0, start:stop] = torch.arange(stop - start)
            continue
        own = segments[number]
        positions[0, start:stop] = torch.arange(own.start, own.start + stop - start)
        tokens = torch.arange(own.row * s + own.start, own.row * s + own.stop)
        token_of[0, start : start + own.size] = tokens
        followed = own.size if own.stop < lengths[own.row] else own.size - 1  # what a shared prompt's last token predicts, no loss looks at
        next_token_of[0, start : start + followed] = tokens[:followed] + 1
    device = batch.tokens.device
    return token_of.to(device), next_token_of.to(device), positions.to(device)


def _packed_bounds(lengths: list[int], splits: Splits, total: int) -> list[int]:
    """Where each sequence starts, and the end; what is left of `total` is a sequence of padding."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + _round_up(length, splits.row_multiple))
    return bounds if bounds[-1] == total else [*bounds, total]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
