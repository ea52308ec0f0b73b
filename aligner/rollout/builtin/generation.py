"""Continuous batching over a paged cache: a finished response frees its seat at once, as long as there are requests.

The loop alternates between two kinds of steps. A prefill step puts pieces of prompts into the cache, at most `prefill_chunk_tokens` in one
pass; a decode step computes one more token of every running response. Prompts go first, since a decode step costs nearly as much for a few
responses as for many.

A prompt is computed once for all responses to it (a GRPO group), and full pages of common prefixes are shared. If pages run
out, the response that arrived last releases its pages; its tokens so far are recomputed when there is room. Models with delta nets share
only a group's prompt (`aligner.rollout.builtin.attention.SeatStates`).

If another thread gives the decoder new weights meanwhile (`Gate`), running responses continue with them. Their keys and values stay
those of the old weights (as in PipelineRL, Piche et al. 2025, 2509.19128), or are recomputed (as in AReaL, Fu et al. 2025, 2505.24298).
Shared prefixes are forgotten in both cases.

If the work has callers (`aligner.rollout.engine.Callers`), a request that cannot be answered fails alone, one that nobody waits for any
more loses seat and pages before the next step, and tokens are told as they arrive on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from aligner.errors import AlignerError, EngineError
from aligner.parallel import platform
from aligner.rollout.builtin.attention import PagedKV, PrefillChunk, upload
from aligner.rollout.builtin.decode import Decoder
from aligner.rollout.builtin.running import Ended, Fetch, RunningBatch, Transcript
from aligner.rollout.builtin.sampling import Sampler
from aligner.rollout.builtin.scheduler import Counters, PagePool, Piece, Prefix, Response, Scheduler, SeenPrompt, copies, seat_copies
from aligner.rollout.builtin.seeing import Eyes
from aligner.rollout.engine import GenRequest, GenResult, Work, callers_of, check_ids, limit_of
from aligner.rollout.engine.gate import Gate
from aligner.types import FinishReason, Images, LogprobKind, Routes, SamplingConfig

_REFILL_PART = 8  # prompts are computed when this part of the seats is free, or all that wait can have one
PATIENCE = 8  # decode steps after which callers get what seats are free


@dataclass(kw_only=True, eq=False)
class Generation:
    """Samples with a decoder. Every rank of a replica constructs it and runs it with the same requests."""

    decoder: Decoder
    max_batch_size: int  # responses that are decoded at a time
    kv_cache_tokens: int  # room of the cache; 0: as much as `max_batch_size` responses of the greatest length need
    prefill_chunk_tokens: int  # tokens of one prefill pass
    eos_id: int  # ends a response, besides the sampling's own stop tokens
    decode: Callable[[Sequence[int]], str] | None = None  # token ids to text, for stop strings
    # Steps that are launched before the results of an earlier one are read: this hides the host's work behind an accelerator's, and costs
    # each response one more row of one step.
    steps_ahead: int = 0
    pauses: Gate | None = None  # asked before each step that begins no prompt; None: the weights never change
    recompute: bool = False  # after new weights, compute keys and values of running responses again
    eyes: Eyes | None = None  # of a model that sees
    counters: Counters = field(default_factory=Counters, init=False)  # of the last run
    _kept: PagedKV | None = field(default=None, init=False)  # between two generations

    def run(self, work: Work, sampling: SamplingConfig, version: int) -> Iterator[list[GenResult]]:
        """Responses to all requests of `work` as they end, in any order; `version` is the weights' current one.

        Raises EngineError naming a request whose prompt is empty or leaves no room in the context, or which does not fit into a cache of
        `kv_cache_tokens` even alone, unless it has a caller to be told. At the end, also after an error, the cache's memory is released,
        or kept until `release` if the decoder `keeps_addresses`.
        """
        self.counters = Counters()
        loop = _Loop(self, work, sampling, version)
        loop.spare, self._kept = self._kept, None
        try:
            while (finished := loop.step()) is not None:
                if finished:
                    yield [_result(ended) for ended in finished]
        finally:
            self._kept = (loop.cache or loop.spare) if self.decoder.keeps_addresses else None

    def release(self) -> None:
        """Release the memory of a kept cache. Not during a generation."""
        self._kept = None


class _Loop:
    """One run."""

    def __init__(self, owner: Generation, work: Work, sampling: SamplingConfig, version: int) -> None:
        self.owner = owner
        self.version = version
        self.decoder = decoder = owner.decoder
        self.work, self.callers = work, callers_of(work)
        self.sampling = sampling
        self.counters = owner.counters
        num_seats, device, page_size = owner.max_batch_size, platform.device(), decoder.page_size
        self.device = device
        self.refill = max(1, num_seats // _REFILL_PART)
        self.prefilled_at = 0  # the number of the decode step
        pool = PagePool(0, page_size, shares=not decoder.architecture.linear_attention_layers)
        self.scheduler = Scheduler(pool, num_seats=num_seats, chunk_tokens=owner.prefill_chunk_tokens, counters=owner.counters)
        self.sampler = Sampler(
            sampling,
            eos_id=owner.eos_id,
            vocab_size=decoder.architecture.vocab_size,
            num_seats=num_seats,
            device=device,
            decode=owner.decode,
            add_up=decoder.add_up,
            fused=decoder.fused_draw,
        )
        max_pages = -(-decoder.max_sequence_length // page_size)
        max_length = min(sampling.longest, decoder.max_sequence_length)
        self.running = RunningBatch(
            num_seats=num_seats, max_length=max_length, max_pages=max_pages, page_size=page_size, device=device, sees=owner.eyes is not None
        )
        self.transcript = Transcript(num_seats=num_seats, max_length=max_length, raw=sampling.raw_logprobs)
        self.under_way: deque[Fetch] = deque()
        self.finished: list[Ended] = []
        self.has_more_work = True
        self.most_pages = 0  # the most that any request so far needs
        self.cache: PagedKV | None = None  # may have more pages than the pool
        self.spare: PagedKV | None = None  # the cache of the generation before

    def step(self) -> list[Ended] | None:
        """At most one pass of the decoder. Returns the responses found to have ended since the last step, None after the last response."""
        self._pause()
        if self.callers is not None and (left := self.callers.left()):
            self._drop(set(left))
        ready = self._admit()
        if ready or self.scheduler.prefilling:
            self._prefill(ready)
        elif len(self.running):
            self._decode()
        elif not self.under_way and not self.has_more_work:
            return None
        self._collect(self.owner.steps_ahead if len(self.running) or self.scheduler.prefilling else 0)
        finished, self.finished = self.finished, []
        return finished

    def _pause(self) -> None:
        """Let another thread change the weights; not between two pieces of a prompt, which must have the same weights."""
        pauses = self.owner.pauses
        if pauses is None or self.scheduler.prefilling:
            return
        version = pauses.between_steps(lambda: self._collect(0))
        if version is None or version == self.version:
            return
        self.version = version
        self.counters.refits += 1
        if self.owner.recompute:
            while self.scheduler.seated:
                self._preempt()
        for response in self.running.responses:
            response.sampled_by(version, self.running.num_drawn(response))
        self.scheduler.forget_everything()

    def _drop(self, left: set[int]) -> None:
        """Free what these requests have. Rows of steps under way are those of responses that have ended."""
        for response in [*self.scheduler.waiting, *self.scheduler.seated.values()]:
            if response.request.index in left:
                self.scheduler.drop(response)
                self.transcript.forget(response)
        self.running.drop_unseated()

    def _admit(self) -> list[tuple[Prefix, Response]]:
        """Take requests and seat them, if that is worth a step; returns those that are ready for a draw."""
        scheduler = self.scheduler
        free = scheduler.num_free_seats
        is_late = self.callers is not None and self.counters.decode_steps >= self.prefilled_at + PATIENCE
        refill = 1 if is_late else self.refill
        if self.has_more_work and not scheduler.waiting and (free >= refill or not scheduler.seated):
            self._take(free)
        if scheduler.seated and free < min(refill, len(scheduler.waiting)):
            return []
        ready = scheduler.admit()
        self._copy_pages(ready)  # before anything is written into pages that were given back meanwhile
        return ready

    def _take(self, room: int) -> None:
        """Take more requests, at most once before a step: a queue that replicas share hands out one part at a time."""
        requests = self.work.take(room)
        self.has_more_work = bool(requests) or self.work.is_open
        for request in requests:
            try:
                self._arrive(request)
            except AlignerError as error:
                if self.callers is None:
                    raise
                self.callers.refuse(request.index, error)
        if self.scheduler.waiting:
            self._provide()

    def _arrive(self, request: GenRequest) -> None:
        limit = limit_of(request, self.sampling, self.decoder.max_sequence_length)
        self._check(request, limit)
        seen = self._look(request)
        self.most_pages = max(self.most_pages, self.scheduler.pool.pages_for(len(request.tokens) + limit - 1))
        self.scheduler.arrive(request, limit, seen)

    def _look(self, request: GenRequest) -> SeenPrompt | None:
        if self.owner.eyes is not None:
            return self.owner.eyes.look(request)
        if Images.name in request.extras and Images.digests(request.extras[Images.name]):
            wanted = "allowed: model.images=true, or model.implementation=transformers"
            raise EngineError(f"request {request.index}: has images, which the policy's layers do not read; {wanted}")
        return None

    def _check(self, request: GenRequest, limit: int) -> None:
        length, kv_cache_tokens = len(request.tokens), self.owner.kv_cache_tokens
        if self.callers is not None:  # what others send
            check_ids(request, self.decoder.architecture.vocab_size)
        self.sampler.manner(request.sampling)
        needed = self.scheduler.pool.pages_for(length + limit - 1) * self.decoder.page_size
        if kv_cache_tokens and needed > kv_cache_tokens:
            raise EngineError(
                f"request {request.index}: a prompt of {length} tokens and a response of up to {limit} need {needed} tokens of the "
                f"key-value cache, which rollout.kv_cache_tokens={kv_cache_tokens} has no room for: make it at least {needed}"
            )

    def _provide(self) -> None:
        """Make the cache large enough, and keep its contents in place.

        Without a stated size, every response that has arrived can become as long as the longest may, with one more page each.
        """
        pool, owner = self.scheduler.pool, self.owner
        kept = 0 if self.callers is None else self.scheduler.num_turns  # their next turns may come at any time
        seats = min(len(self.scheduler.seated) + len(self.scheduler.waiting) + kept, owner.max_batch_size)
        wanted = owner.kv_cache_tokens // pool.page_size or seats * (self.most_pages + 1)
        if wanted > pool.num_pages:
            self._grow(wanted)
        if self.cache.states is not None:
            self.cache.states.reserve(seats)

    def _grow(self, wanted: int) -> None:
        pool, owner = self.scheduler.pool, self.owner
        if self.cache is not None:  # a shared queue gives one part at a time: do not copy for each part
            wanted = max(wanted, min(2 * pool.num_pages, owner.max_batch_size * (self.most_pages + 1)))
        else:
            self.cache = self._take_spare(wanted)
        old = self.cache
        if old is None or old.num_pages < wanted:
            self.cache = self.decoder.new_cache(wanted)
            if old is not None:
                for before, after in zip(old.tensors, self.cache.tensors, strict=True):
                    after[:, : pool.num_pages] = before[:, : pool.num_pages]
                self.cache = replace(self.cache, states=old.states)
        pool.extend(wanted)

    def _take_spare(self, num_pages: int) -> PagedKV | None:
        """The cache of the generation before, if it has that many pages; else its memory is released before a larger one is made."""
        spare, self.spare = self.spare, None
        if spare is None or spare.num_pages < num_pages:
            return None
        spare.clear()
        return spare

    def _prefill(self, ready: list[tuple[Prefix, Response]]) -> None:
        """Put the next pieces of prompts into the cache, and draw for the responses whose prompts are complete."""
        self.prefilled_at = self.counters.decode_steps
        pieces = self.scheduler.next_pieces()
        if pieces:
            chunks = [self._chunk(piece) for piece in pieces]
            self.counters.prefill_passes += 1
            logits = self.decoder.prefill(chunks, self.cache)
            complete = [piece.prefix for piece in pieces if piece.is_last]
            computed = [(p, response) for p, row in zip(complete, logits, strict=True) for response in self.scheduler.computed(p, row)]
            self._copy_pages(computed)
            self._copy_states(computed)
            ready = ready + computed
            self.scheduler.forget_surplus()
        if ready:
            self._begin(ready)

    def _chunk(self, piece: Piece) -> PrefillChunk:
        prefix, seen, tokens = piece.prefix, None, piece.prefix.tokens[piece.start : piece.end]
        if prefix.seen is not None and self.owner.eyes is not None:
            seen = self.owner.eyes.chunk(prefix.seen, piece.start, piece.end)
            tokens = tuple(max(token, 0) for token in tokens)
        where = {"pages": prefix.pages, "seat": prefix.waiting[0].seat if prefix.waiting else 0}  # nobody waits: only pages are shared
        return PrefillChunk(tokens=tokens, start=piece.start, wants_logits=piece.is_last, seen=seen, **where)

    def _copy_pages(self, pairs: list[tuple[Prefix, Response]]) -> None:
        sources, targets = copies(pairs)
        if sources:
            self.cache.copy_pages(sources, targets)

    def _copy_states(self, pairs: list[tuple[Prefix, Response]]) -> None:
        sources, targets = seat_copies(pairs)
        if sources and self.cache.states is not None:
            self.cache.states.copy(sources, targets)

    def _begin(self, ready: list[tuple[Prefix, Response]]) -> None:
        """Draw for responses whose tokens so far are in the cache; from now on they are decoded."""
        responses = [response for _, response in ready]
        for response in responses:
            prompt = response.request.tokens
            self.sampler.seat(
                response.seat,
                prompt=prompt,
                response=response.tokens[len(prompt) :],
                seed=response.request.seed,
                limit=response.limit,
                sampling=response.request.sampling,
                top=response.request.top,
            )
            response.sampled_by(self.version, len(response.tokens) - len(prompt))
        numbers = [response.seat for response in responses]
        seats = upload(np.array(numbers), self.device)
        draw = self.sampler.draw(torch.stack([prefix.logits for prefix, _ in ready]), seats, numbers)
        self.under_way.append(self.running.join(responses, seats, draw))
        self.running.drop_exhausted()

    def _decode(self) -> None:
        self._find_pages()
        if not len(self.running):
            return
        logits = self.decoder.decode(self.running.inputs(), self.cache)
        draw = self.sampler.draw(logits, self.running.seats, self.running.seat_numbers)
        self.counters.decode_steps += 1
        self.counters.decoded_tokens += len(self.running)
        self.under_way.append(self.running.advance(draw))
        self.running.drop_exhausted()

    def _find_pages(self) -> None:
        """A page for each row that enters one. If none are left, results under way may free some; else the youngest response must wait."""
        while len(rows := self.running.without_page()) and not self.scheduler.find_pages(len(rows)):
            if self.under_way:
                self._collect(0)
            else:
                self._preempt()
        if len(rows):
            self.running.extend(rows, self.scheduler.pool.allocate(len(rows)))

    def _preempt(self) -> None:
        response = self.scheduler.youngest
        if length := self.running.num_drawn(response):
            self.transcript.interrupt(response, length)
            self._keep_routes(response, length)
        self.scheduler.preempt(response)
        self.running.drop_unseated()

    def _collect(self, ahead: int) -> None:
        """Read the results of all steps but the last `ahead`."""
        while len(self.under_way) > ahead:
            ended = self.transcript.record(self.under_way.popleft(), self.callers)
            for response in ended:
                self._keep_routes(response.response, len(response.tokens))
                if self.work.is_open:
                    self.scheduler.keep(response.response, response.tokens)
                self.scheduler.leave(response.response)
            if ended:
                self.finished += ended
                self.running.drop_unseated()

    def _keep_routes(self, response: Response, num_sampled: int) -> None:
        """Before the response's pages go. Tokens that were computed again keep the experts that they were sampled with."""
        if self.cache is None or self.cache.routes is None:
            return
        routes = self.cache.routes_of(response.pages, len(response.request.tokens) + num_sampled - 1)
        if response.routes is not None:
            routes[: len(response.routes)] = response.routes
        response.routes = routes


def _result(ended: Ended) -> GenResult:
    versions = tuple(ended.response.versions)
    return GenResult(
        index=ended.response.request.index,
        tokens=ended.tokens,
        logprobs=ended.logprobs,
        raw_logprobs=ended.raw_logprobs,
        kind=LogprobKind.sampled,
        finish_reason=FinishReason.stop if ended.stopped else FinishReason.length,
        weight_version=versions[-1][1],
        versions=versions if len(versions) > 1 else (),
        extras={} if ended.response.routes is None else {Routes.name: ended.response.routes},
    )
