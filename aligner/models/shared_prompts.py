"""Computing a prompt once for all the responses to it, in training too (as Prefix Grouper does, Liu et al. 2025, 2506.05433).

Rows that begin with the same tokens, none of which counts in a loss, form a *family*. In a packed input its prompt is stored once, as its
own segment; each row continues it. The last token of a prompt is not shared, because its hidden state predicts another first token in
every row. Outputs and gradients equal those of separate rows: a prompt's keys and values accumulate the gradients of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.parallel.mcore import PackedSeqParams
from aligner.parallel.micro_batches import Family
from aligner.types import Batch, MaskedBatch, TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of a row, which lie together in the packed input; `prefix` is the segment that they go on from."""

    row: int
    start: int
    stop: int
    prefix: int | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass
class SegmentedPackedSeqParams(PackedSeqParams):
    """For Megatron-Core one sequence over the whole input, so that it takes each slot's rotary embedding as it is given; for our attention
    the segments: (first slot, one beyond the last, index of the prefix or -1)."""

    segments: tuple[tuple[int, int, int], ...] = ()
    positions: torch.Tensor | None = None  # int64 [T], within their sequences


def segments_of(batch: Batch, *, share: bool) -> list[Segment]:
    """The packed input of a micro-batch, in order: whole rows, and where `share` asks for it each family's prompt before its rows."""
    lengths = batch.lengths.tolist()
    shared = _shared_with_row_before(batch) if share and not isinstance(batch, TokenBatch) else [0] * len(lengths)
    found: list[Segment] = []
    prefix: int | None = None
    for row, length in enumerate(lengths):
        follows = shared[row + 1] if row + 1 < len(lengths) else 0
        if not shared[row]:
            prefix = None
            if follows:
                prefix = len(found)
                found.append(Segment(row=row, start=0, stop=follows))
        found.append(Segment(row=row, start=0 if prefix is None else found[prefix].stop, stop=length, prefix=prefix))
    return found


def families(batch: MaskedBatch, *, unit: int, capacity: int) -> list[Family]:
    """Rows of the whole batch by their prompts, `unit` neighbours always together; cut where one would have more than `capacity` tokens."""
    lengths, prompts = batch.lengths.tolist(), _prompt_keys(batch)
    by_prompt: dict[object, list[int]] = {}
    for start in range(0, len(lengths), unit):
        keys = set(prompts[start : start + unit])
        by_prompt.setdefault(keys.pop() if len(keys) == 1 else start, []).append(start)
    found: list[Family] = []
    for key, starts in by_prompt.items():
        shared = key[0] - 1 if isinstance(key, tuple) else 0
        for start in starts:
            rows = tuple(range(start, start + unit))
            added = sum(lengths[row] - shared for row in rows)
            if start != starts[0] and found[-1].size + added <= capacity:
                found[-1] = Family(rows=found[-1].rows + rows, size=found[-1].size + added)
            else:
                found.append(Family(rows=rows, size=shared + added))
    return found


def _prompt_keys(batch: MaskedBatch) -> list[object]:
    """A row's (prompt length, prompt); the row's own number where it has no prompt of two tokens or more before what a loss looks at."""
    first = batch.loss_mask.int().argmax(dim=1).tolist()  # 0 too where nothing is looked at
    tokens = batch.tokens.cpu().numpy()
    return [(stop, tokens[row, :stop].tobytes()) if stop > 1 else row for row, stop in enumerate(first)]


def _shared_with_row_before(batch: MaskedBatch) -> list[int]:
    """How many tokens each row shares with the one before it; 0 where that has another prompt."""
    keys = _prompt_keys(batch)
    return [0] + [key[0] - 1 if isinstance(key, tuple) and key == before else 0 for before, key in zip(keys[:-1], keys[1:], strict=True)]


def packed_params(segments: Sequence[Segment], positions: torch.Tensor, length: int) -> SegmentedPackedSeqParams:
    """Megatron-Core's description of a packed input [1, length], with shared prompts or without; slots after the last one are padding."""
    bounds, start = [], 0
    for segment in segments:
        bounds.append((start, start + segment.size, -1 if segment.prefix is None else segment.prefix))
        start += segment.size
    if start < length:
        bounds.append((start, length, -1))
    whole = torch.tensor([0, length], dtype=torch.int32, device=positions.device)
    return SegmentedPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        segments=tuple(bounds),
        positions=positions.flatten(),
    )
