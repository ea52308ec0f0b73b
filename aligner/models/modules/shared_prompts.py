"""Computing a prompt once for all the responses to it, in training too (as Prefix Grouper does, Liu et al. 2025, 2506.05433).

Rows that begin with the same tokens, none of which counts in a loss, form a *family*. In a packed input its prompt is stored once, as its
own segment; each row continues it. The last token of a prompt is not shared, because its hidden state predicts another first token in
every row. Outputs and gradients equal those of separate rows: a prompt's keys and values accumulate the gradients of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from aligner.parallel.context import chunk_numbers
from aligner.parallel.mcore import PackedSeqParams
from aligner.types import Batch, MaskedBatch
from aligner.types.rows import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of a row, which lie together in the packed input; `prefix` is the segment that they continue."""

    row: int
    start: int
    stop: int
    prefix: int | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySpans:
    """Which keys each run of queries attends to, causally at their ends: for kernels that take all runs of an input in one call."""

    queries: Tensor  # int32 [N + 1], the slots where the N runs begin, and the end
    keys: Tensor  # int32 [N + 1], the same of what `slots` has for each run
    slots: (
        Tensor | None
    )  # int64 [K], of all runs' keys; None where these are the queries' own. The slots of several ranks: one's, the next's
    most_queries: int  # of a run
    most_keys: int

    def to(self, device: torch.device) -> KeySpans:
        return replace(self, **{one.name: upload(x, device) for one in fields(self) if isinstance(x := getattr(self, one.name), Tensor)})


@dataclass
class SegmentedPackedSeqParams(PackedSeqParams):
    """A packed input for our own core attention, known on the host: no layer reads sizes back from the device.

    Megatron-Core finds no sequences in it (or one over everything, for kernels that need one), and takes each slot's rotary embedding as
    it is given.
    """

    segments: tuple[tuple[int, int, int], ...] = ()  # on this rank: (first slot, one beyond the last, index of the prefix or -1)
    positions: Tensor | None = None  # int64 [T], within their sequences
    spans: KeySpans | None = None


def segments_of(batch: Batch, *, share: bool) -> list[Segment]:
    """The packed input of a micro-batch, in order: whole rows, and where `share` asks for it each family's prompt before its rows."""
    lengths = batch.lengths.tolist()
    shared = [0] * len(lengths)  # tokens that each row shares with the one before it
    if share and isinstance(batch, MaskedBatch):
        pairs = itertools.pairwise(prompt_keys(batch))
        shared = [0] + [key[0] - 1 if isinstance(key, tuple) and key == before else 0 for before, key in pairs]
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


def prompt_keys(batch: MaskedBatch) -> list[object]:
    """A row's (prompt length, prompt); the row's own number where it has no prompt of two tokens or more before what a loss looks at.

    Prompts whose shared tokens have other extras, such as other experts, are not the same.
    """
    first = batch.loss_mask.int().argmax(dim=1).tolist()  # 0 too where nothing is looked at
    tokens = batch.tokens.cpu().numpy()
    kept = [b"".join(extra.prompt_key(row, stop) for extra in batch.extras.values()) for row, stop in enumerate(first)]
    return [(stop, tokens[row, :stop].tobytes() + kept[row]) if stop > 1 else row for row, stop in enumerate(first)]


def local_segments(segments: Sequence[Segment], bounds: Sequence[int], cp_size: int) -> list[tuple[int, int, int]]:
    """(first slot, one beyond the last, index of the prefix or -1) on each context-parallel rank, which holds an equal part of every
    segment. `bounds`: where each starts in the whole input, and the end; what is behind the last segment is padding."""
    prefixes = [-1 if segment.prefix is None else segment.prefix for segment in segments]
    prefixes += [-1] * (len(bounds) - 1 - len(prefixes))
    return [(start // cp_size, stop // cp_size, prefix) for start, stop, prefix in zip(bounds[:-1], bounds[1:], prefixes, strict=True)]


def key_spans(segments: Sequence[tuple[int, int, int]], cp_rank: int, cp_size: int) -> KeySpans:
    """The keys of every segment on this rank: its prompt's and its own; under context parallelism those of every chunk up to its own.

    Under context parallelism the keys of all ranks lie one rank's after the other's, as an all-gather gives them.
    """
    if cp_size == 1:
        runs = [(stop - start, [*([segments[prefix][:2]] if prefix >= 0 else []), (start, stop)]) for start, stop, prefix in segments]
        is_own = all(prefix < 0 for _, _, prefix in segments)
    else:
        runs, is_own = [run for segment in segments for run in _chunk_runs(segment, segments[-1][1], cp_rank, cp_size)], False
    queries, keys = [0], [0]
    for size, spans in runs:
        queries.append(queries[-1] + size)
        keys.append(keys[-1] + sum(stop - start for start, stop in spans))
    return KeySpans(
        queries=torch.tensor(queries, dtype=torch.int32),
        keys=torch.tensor(keys, dtype=torch.int32),
        slots=None if is_own else torch.cat([torch.arange(start, stop) for _, spans in runs for start, stop in spans]),
        most_queries=max(size for size, _ in runs),
        most_keys=max(stop - start for start, stop in zip(keys[:-1], keys[1:], strict=True)),
    )


def _chunk_runs(segment: tuple[int, int, int], length: int, cp_rank: int, cp_size: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """(queries, spans of their keys in all ranks' `length` slots each) of the two chunks of a sequence that a rank holds."""
    start, stop, _ = segment
    size = (stop - start) // 2

    def place(chunk: int) -> tuple[int, int]:
        rank, late = (chunk, 0) if chunk < cp_size else (2 * cp_size - 1 - chunk, size)
        return rank * length + start + late, rank * length + start + late + size

    return [(size, [place(chunk) for chunk in range(own + 1)]) for own in chunk_numbers(cp_rank, cp_size)]
