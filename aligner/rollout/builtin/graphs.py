"""CUDA graphs of decode steps: a step is recorded once for each size and replayed, which costs one launch instead of hundreds.

A graph keeps the addresses of its inputs (buffers that each step fills), of the logits (a buffer that all graphs share), and of the weights
and the cache; if one of these has moved, all graphs are recorded again. Sizes are rounded up to keep their number small. Padding rows write
to the cache's scratch page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from aligner.rollout.builtin.attention import DecodeBatch, PagedKV
from aligner.rollout.config import graph_rows

WARM_UPS = 2


Capture = Callable[[Callable[[], object]], Callable[[], None]]  # records the kernels of a function, and returns their replay


@dataclass(eq=False)
class DecodeGraphs:
    """Decode steps by graph. Every rank of a replica makes the same calls, so all record and replay together."""

    step: Callable[[DecodeBatch, PagedKV, Tensor], object]  # writes a batch's logits to its third argument, float32 [B, `vocab_size`]
    new_capture: Callable[[], Capture]  # called for each set of graphs that live together
    _: KW_ONLY
    max_pages: int
    vocab_size: int
    # By size: fill the inputs, replay, read the logits.
    _recorded: dict[tuple[int, int], tuple[DecodeBatch, Callable[[], None], Tensor]] = field(default_factory=dict, init=False)
    _addresses: tuple[int, ...] = field(default=(), init=False)
    _logits: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._capture = self.new_capture()

    def __call__(self, batch: DecodeBatch, cache: PagedKV, weights: tuple[int, ...]) -> Tensor:
        """Logits [B, V], overwritten by the next call. `weights`: the addresses of all weights."""
        addresses = (*weights, *(tensor.data_ptr() for tensor in cache.tensors), cache.num_pages)
        if addresses != self._addresses:
            self.release()
            self._addresses = addresses
        rows, columns = batch.pages.shape
        size = graph_rows(rows), min(round_pages(columns), self.max_pages)
        if size not in self._recorded:
            self._recorded[size] = self._record(size, batch, cache)
        inputs, replay, logits = self._recorded[size]
        inputs.tokens[:rows].copy_(batch.tokens)
        inputs.positions[:rows].copy_(batch.positions)
        inputs.pages[:rows, :columns].copy_(batch.pages)
        inputs.positions[rows:].zero_()
        if inputs.rotary is not None and batch.rotary is not None:  # all batches of a model have it, or none
            inputs.rotary[:rows].copy_(batch.rotary)
            inputs.rotary[rows:].zero_()
        inputs.pages[rows:].fill_(cache.num_pages)  # the scratch page
        replay()
        return logits[:rows]

    def release(self) -> None:
        if self._recorded:
            self._recorded.clear()
            self._capture = self.new_capture()  # a pool whose graphs are all gone accepts no others
        self._addresses, self._logits = (), None

    def _record(self, size: tuple[int, int], batch: DecodeBatch, cache: PagedKV) -> tuple[DecodeBatch, Callable[[], None], Tensor]:
        """Recording runs the step, on rows that all write to the scratch page."""
        inputs = DecodeBatch(
            tokens=batch.tokens.new_zeros(size[0]),
            positions=batch.positions.new_zeros(size[0]),
            pages=batch.pages.new_full(size, cache.num_pages),
            rotary=None if batch.rotary is None else batch.rotary.new_zeros(size[0]),
        )
        logits = self._logits_of(size[0], batch.tokens.device)
        return inputs, self._capture(lambda: self.step(inputs, cache, logits)), logits

    def _logits_of(self, rows: int, device: torch.device) -> Tensor:
        """The first rows of the buffer. Graphs recorded before it grew keep the smaller one; it at least doubles, so there are few."""
        room = 0 if self._logits is None else self._logits.shape[0]
        if self._logits is None or room < rows:
            self._logits = torch.empty(max(rows, 2 * room), self.vocab_size, dtype=torch.float32, device=device)
        return self._logits[:rows]


def round_pages(pages: int) -> int:
    """The graph's width of a page table: a power of two."""
    return 1 << (pages - 1).bit_length()


class CudaCapture:
    """A `Capture` on the current GPU. All graphs share one pool of memory: only one runs at a time, and each writes what it reads.

    The pool lives as long as one of its graphs does. The allocator accepts no graph for a pool whose graphs are all gone
    (`create_or_incref_pool`: use_count > 0 INTERNAL ASSERT FAILED): then another capture is needed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose algorithms and allocate workspaces on their first calls
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (clients of the servers, the collective library's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay
