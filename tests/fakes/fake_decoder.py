"""A decoder that finds its logits in what is really in the cache: a wrong page, a stale one or a wrong position gives other tokens. What
runs it, and what each response has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.parallel.logprobs import row_sums
from aligner.protocols import Replica
from aligner.rollout.builtin.attention import DecodeBatch, PagedKV, PrefillChunk
from aligner.rollout.builtin.generation import Generation
from aligner.rollout.builtin.sampling import Draw, Sampler
from aligner.rollout.engine import Capabilities, GenResult, Work
from aligner.types import LogprobKind, SamplingConfig

_PRIME = 1_000_003
VOCAB, PAGE, CONTEXT, EOS = 13, 4, 64, 2


class FakeDecoder:
    """Keys hold tokens and values hold positions. Logits are noise that a hash of all tokens of the sequence chooses."""

    add_up, fused_draw, keeps_addresses = staticmethod(row_sums), None, False

    def __init__(self, *, vocab_size: int = VOCAB, page_size: int = PAGE, max_sequence_length: int = CONTEXT) -> None:
        self.architecture = SimpleNamespace(vocab_size=vocab_size, linear_attention_layers=[])
        self.page_size = page_size
        self.max_sequence_length = max_sequence_length
        self.caches: list[int] = []  # pages of those that were made
        self.passes: list[tuple[str, int]] = []  # ("prefill", tokens) or ("decode", rows)
        self._noise = 2 * torch.randn(997, vocab_size, generator=torch.Generator().manual_seed(1))

    def new_cache(self, num_pages: int) -> PagedKV:
        self.caches.append(num_pages)
        shape = (1, num_pages + 1, self.page_size, 1, 1)
        return PagedKV(keys=torch.full(shape, -7.0), values=torch.full(shape, -7.0))

    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        self.passes.append(("prefill", sum(len(chunk.tokens) for chunk in chunks)))
        for chunk in chunks:
            assert len(chunk.tokens) > 0
            for position, token in enumerate(chunk.tokens, start=chunk.start):
                _write(cache, chunk.pages, position, token)
        wanted = [(chunk.pages, chunk.start + len(chunk.tokens)) for chunk in chunks if chunk.wants_logits]
        return torch.stack([self.logits_of(_read(cache, *place)) for place in wanted]) if wanted else torch.zeros(0, self._noise.shape[1])

    def decode(self, batch: DecodeBatch, cache: PagedKV) -> Tensor:
        rows = list(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.pages.tolist(), strict=True))
        self.passes.append(("decode", len(rows)))
        places = [(pages[position // self.page_size], position % self.page_size) for _, position, pages in rows]
        assert len(set(places)) == len(rows), "two sequences write to one slot"
        for token, position, pages in rows:
            assert position < self.max_sequence_length
            _write(cache, pages, position, token)
        return torch.stack([self.logits_of(_read(cache, pages, position + 1)) for _, position, pages in rows])

    def logits_of(self, tokens: Sequence[int]) -> Tensor:
        """Float32 [V] after these tokens."""
        code = 0
        for token in tokens:
            code = (code * 31 + token + 1) % _PRIME
        return self._noise[code % self._noise.shape[0]]


def _write(cache: PagedKV, pages: Sequence[int], position: int, token: int) -> None:
    place = 0, pages[position // cache.page_size], position % cache.page_size
    assert place[1] != cache.num_pages
    cache.keys.numpy()[place], cache.values.numpy()[place] = token, position  # tensors would take most of the tests' time


def _read(cache: PagedKV, pages: Sequence[int], length: int) -> list[int]:
    """The first `length` tokens of the sequence with this page table."""
    keys, values = (tensor.numpy()[0, list(pages)].ravel()[:length].astype(int).tolist() for tensor in (cache.keys, cache.values))
    assert values == list(range(length)), f"a page holds the tokens of other positions: {values}"
    return keys


def generation_of(decoder: FakeDecoder | None = None, **options: Any) -> Generation:
    """Over this decoder, or one of its own."""
    settings = {"max_batch_size": 8, "kv_cache_tokens": 0, "prefill_chunk_tokens": 16, "eos_id": EOS} | options
    return Generation(decoder=decoder or FakeDecoder(), **settings)


def draws_alone(
    tokens: Sequence[int],
    seed: int,
    sampling: SamplingConfig,
    limit: int,
    *,
    eos_id: int = EOS,
    decoder: FakeDecoder | None = None,
    before: Callable[[int], None] = lambda number: None,
) -> list[Draw]:
    """A response by the plainest loop there is: no cache, no pages, no companions. `before(number)` is called before each draw."""
    decoder = decoder or FakeDecoder()
    sampler = Sampler(sampling, eos_id=eos_id, vocab_size=VOCAB, num_seats=1, device=torch.device("cpu"))
    sampler.seat(0, prompt=tokens, response=(), seed=seed, limit=limit)
    draws: list[Draw] = []
    while not draws or not int(draws[-1].ended):
        before(len(draws))
        logits = decoder.logits_of([*tokens, *(int(draw.tokens) for draw in draws)])
        draws.append(sampler.draw(logits[None], torch.tensor([0])))
    return draws


class RunEngine:
    """`aligner.rollout.engine.Engine` around `run(work, sampling, version)`, which answers a `Work`."""

    replica = Replica()
    capabilities = Capabilities(name="fake", logprobs=LogprobKind.sampled, serves=True)

    def __init__(self, run: Callable[..., Iterator[list[GenResult]]], context: int) -> None:
        self._run = run
        self.max_sequence_length = context
        self.version = 0

    def refit(self, version: int) -> int:
        self.version = version
        return 0

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        return self._run(work, sampling, self.version)

    def shutdown(self) -> None: ...
