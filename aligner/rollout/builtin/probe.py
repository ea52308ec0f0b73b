"""The engine's side of a comparison: its decoder traced over sequences, all in prefill passes, or from the response on in decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aligner.models.training.tracing import SPLIT, Operation, Place, Trace
from aligner.parallel import platform
from aligner.parallel.collectives import gather_columns
from aligner.rollout.builtin.attention import DecodeBatch, PagedKV, PrefillChunk
from aligner.rollout.builtin.decode import Decoder

_LAST = (Operation.final_norm, Operation.logits)  # only for tokens whose logits are wanted


class SequenceProbe:
    """A decoder and a cache for these sequences (token ids). Every rank of a replica makes it. `chunk_tokens` bounds a prefill pass."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]], *, chunk_tokens: int) -> None:
        self._decoder = decoder
        self._sequences = [list(sequence) for sequence in sequences]
        self._chunk_tokens = chunk_tokens
        size = decoder.page_size
        counts = [-(-len(sequence) // size) for sequence in self._sequences]
        self._pages = [list(range(sum(counts[:row]), sum(counts[: row + 1]))) for row in range(len(counts))]
        self._cache: PagedKV = decoder.new_cache(sum(counts))
        if self._cache.states is not None:
            self._cache.states.reserve(len(counts))

    def prefill(self, trace: Trace) -> None:
        """Trace all tokens through prefill passes. Collective over the replica."""
        self._prefill([len(sequence) for sequence in self._sequences], trace)

    def decode(self, starts: Sequence[int], trace: Trace) -> None:
        """Trace the tokens from `starts` (one position per sequence, above 0) on through decode steps, all sequences side by side."""
        self._prefill(starts, None)
        device, width = platform.device(), trace.wanted.shape[1]
        for step in range(max(len(s) - start for s, start in zip(self._sequences, starts, strict=True))):
            rows = [row for row, start in enumerate(starts) if start + step < len(self._sequences[row])]
            at = [starts[row] + step for row in rows]
            most = max(len(self._pages[row]) for row in rows)
            batch = DecodeBatch(
                tokens=torch.tensor([self._sequences[row][t] for row, t in zip(rows, at, strict=True)], device=device),
                positions=torch.tensor(at, device=device),
                pages=torch.tensor([self._pages[r] + [0] * (most - len(self._pages[r])) for r in rows], dtype=torch.int32, device=device),
                seats=torch.tensor(rows, device=device),
            )
            tokens = torch.tensor([row * width + t for row, t in zip(rows, at, strict=True)])
            with self._looking(trace, tokens, tokens):
                self._decoder.decode(batch, self._cache)

    def _prefill(self, ends: Sequence[int], trace: Trace | None) -> None:
        """The first `ends` tokens of each sequence, in passes of as many tokens as fit."""
        for pieces in _passes(ends, self._chunk_tokens):
            chunks = [
                PrefillChunk(tokens=self._sequences[row][start:stop], start=start, pages=self._pages[row], wants_logits=True, seat=row)
                for row, start, stop in pieces
            ]
            if trace is None:
                self._decoder.prefill(chunks, self._cache)
                continue
            width = trace.wanted.shape[1]
            tokens = torch.tensor([row * width + t for row, start, stop in pieces for t in range(start, stop)])
            last = torch.tensor([row * width + stop - 1 for row, _, stop in pieces])
            with self._looking(trace, tokens, last):
                self._decoder.prefill(chunks, self._cache)

    @contextmanager
    def _looking(self, trace: Trace, tokens: Tensor, last: Tensor) -> Iterator[None]:
        """Add the decoder's outputs of one pass to the trace: their rows are `tokens`, for the last operations `last`."""
        decoder = self._decoder
        group = decoder.shards.group if decoder.shards.count > 1 else None

        def look(operation: Operation, layer: int, output: Tensor) -> None:
            own = last if operation in _LAST else tokens
            rows = output.reshape(len(own), -1)
            trace.add(Place(layer, operation), own, gather_columns(rows, group) if operation in SPLIT else rows)

        decoder.tap = look
        try:
            yield
        finally:
            decoder.tap = None


def _passes(ends: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """(row, start, stop) of the pieces of each prefill pass: at most `most` tokens, a row at most once."""
    done = [0] * len(ends)
    while any(start < end for start, end in zip(done, ends, strict=True)):
        room, pieces = most, []
        for row, end in enumerate(ends):
            size = min(end - done[row], room)
            if size:
                pieces.append((row, done[row], done[row] + size))
                done[row] += size
                room -= size
        yield pieces
