"""Sampling for callers in other threads, one request at a time, as an HTTP endpoint needs it.

The thread that owns the engine calls `run`, on every rank of the replica; any thread of the leading rank calls `submit`. A request joins
the running batch as soon as a seat is free. It draws from its own seed with its own settings, so its tokens do not depend on the requests
beside it. While nothing is asked the engine waits with its cache, where the next turn of a conversation finds the tokens of the one before.

Before each step the leading rank of a replica tells the others what is new: they sample the same requests, and drop the same ones.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.parallel.collectives import broadcast_object, leaders_integers
from aligner.parallel.transfer import block_group
from aligner.rollout.engine import GenRequest, GenResult, Likeliest
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.types import Images, SamplingConfig

IDLE_SECONDS = 0.05  # between two questions whether the end has come, while nothing is asked
FAREWELL_SECONDS = 5.0  # for the other ranks of a replica to hear that the leading one has failed
_SILENCE, _NEWS, _FAILED = range(3)  # what the leading rank says before each step
_CPU = torch.device("cpu")
OnTokens = Callable[[Sequence[int], Sequence[float], Sequence[Likeliest]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRequest:
    """One response to `tokens`, with settings of its own: `sampling.max_response_length` is its limit.

    `on_tokens` is called in the engine's thread with each piece of the response as it is sampled: token ids, their log-probs, and for each
    the `top` likeliest tokens in its place. It must not block. An engine that tells no pieces gives the response as a whole.
    """

    tokens: tuple[int, ...]
    seed: int
    sampling: SamplingConfig
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # the prompt's (`aligner.types.extras`)
    top: int = 0
    on_tokens: OnTokens | None = None


@dataclass(slots=True, eq=False)
class _Call:
    answer: Future[GenResult]
    on_tokens: OnTokens | None
    heard: int = 0  # tokens that `on_tokens` had


@dataclass(frozen=True, slots=True)
class _News:
    """What has changed since the step before."""

    requests: tuple[GenRequest, ...] = ()
    left: frozenset[int] = frozenset()
    is_over: bool = False


class LiveEngine:
    """One replica's engine, for others' requests. A cancelled future frees its seat. Collective over the component. Raises ConfigError."""

    def __init__(self, engine: PhasedEngine) -> None:
        if not engine.capabilities.serves:
            raise ConfigError(f"rollout.engine={engine.capabilities.name}: answers no requests from outside; allowed: megatron, vllm")
        self.engine, self.max_sequence_length = engine, engine.engine.max_sequence_length  # tokens of prompt and response together
        ranks = max(1, dist.get_world_size() // engine.replica.count) if dist.is_initialized() else 1
        self._group = block_group(ranks, backend="gloo")  # of this thread alone
        self._condition = threading.Condition()  # of the calls and of who has left, which other threads change
        self._calls: dict[int, _Call] = {}  # unanswered, on the leading rank
        self._new: list[GenRequest] = []  # of these, unknown to the engine
        self._left: set[int] = set()
        self._refused, self._has_ended = "", False  # why no more requests are taken, and whether that is for good
        self._count = itertools.count()
        self._is_over: Callable[[], bool] = lambda: True
        self._queue: list[GenRequest] = []  # the same on every rank from here on
        self._given: set[int] = set()  # unfinished, with the engine
        self._dropped: set[int] = set()  # of these, still to be told to the engine
        self._ends = self._has_told = False

    @property
    def version(self) -> int:
        """Of the weights that sample now."""
        return self.engine.version

    def submit(self, request: LiveRequest) -> Future[GenResult]:
        """The response, once it has ended. Raises EngineError for a request that this engine can never answer, and after the end."""
        length, context = len(request.tokens), self.max_sequence_length
        if not 0 < length < context:
            raise EngineError(f"a prompt of {length} tokens leaves no room in the context of {context}")
        if not -(2**63) <= request.seed < 2**63:
            raise EngineError(f"seed {request.seed}: must have 64 bits, sign included")
        if Images.name in request.extras and not self.engine.capabilities.sees:
            raise EngineError(f"the prompt has images, which rollout.engine={self.engine.capabilities.name} does not read")
        answer: Future[GenResult] = Future()
        index, sampling = next(self._count), self.engine.complete(request.sampling)
        about = {"tokens": request.tokens, "seed": request.seed, "extras": request.extras, "top": request.top}
        generation = GenRequest(index=index, sampling=sampling, **about)
        with self._condition:
            if self._refused:
                raise EngineError(self._refused)
            self._calls[index] = _Call(answer, request.on_tokens)
            self._new.append(generation)
            self._condition.notify()
        answer.add_done_callback(lambda one: self._leave(index) if one.cancelled() else None)
        return answer

    def run(self, is_over: Callable[[], bool]) -> None:
        """Answer requests until `is_over` and none is left; every rank of the replica calls it, the leading rank's `is_over` counts.

        What ends it early is raised, and every unanswered request gets an EngineError.
        """
        with self._condition:
            self._is_over = is_over
            self._refused = self._refused if self._has_ended else ""
        self._queue, self._given, self._dropped, self._ends, self._has_told = [], set(), set(), False, False
        try:
            with closing(self.engine.serve(self, SamplingConfig(max_response_length=self.max_sequence_length))) as parts:
                for results in parts:
                    for result in results:
                        self._given.discard(result.index)
                        self._answer(result)
        except BaseException as error:
            self._fail(f"the engine has failed: {str(error) or type(error).__name__}")
            self._part()
            raise

    def close(self) -> None:
        """Answer no more requests: those that wait get an EngineError, and `run` ends."""
        self._has_ended = True
        self._fail("the engine has ended: it answers no more requests")

    # `aligner.rollout.engine.Work` and `Callers`: every rank of the replica calls these at the same points.

    @property
    def callers(self) -> LiveEngine:
        return self

    @property
    def is_open(self) -> bool:
        return not self._ends

    def take(self, room: int) -> Sequence[GenRequest]:
        """Requests that wait. If the engine has nothing to do, waits a moment for one."""
        if not self._queue and not self._given:
            self._hear_news(IDLE_SECONDS)
        taken, self._queue = self._queue[:room], self._queue[room:]
        self._given |= {request.index for request in taken}
        return taken

    def left(self) -> set[int]:
        """Requests with the engine whose futures were cancelled."""
        self._hear_news(0.0)
        dropped, self._dropped = self._dropped & self._given, set()
        self._given -= dropped
        return dropped

    def refuse(self, index: int, error: AlignerError) -> None:
        """The request alone has failed."""
        self._given.discard(index)
        if (call := self._forget(index)) is not None:
            _settle(call.answer, error if isinstance(error, EngineError) else EngineError(str(error)))

    def hear(self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Likeliest] = ()) -> None:
        """The next tokens of a response."""
        call = self._calls.get(index)
        if call is None or call.on_tokens is None:
            return
        call.heard += len(tokens)
        try:
            call.on_tokens(tokens, logprobs, tops)
        except Exception as error:  # of this caller alone
            self._leave(index)
            _settle(call.answer, EngineError(f"on_tokens failed: {type(error).__name__}: {error}"))

    def _hear_news(self, wait_seconds: float) -> None:
        """What the leading rank knows, on every rank. Raises what failed there, EngineError on the others."""
        news, said, error = _News(), _SILENCE, None
        if self.engine.replica.is_leader:
            try:
                news = self._news(wait_seconds)
                said = _SILENCE if news == _News() else _NEWS
            except Exception as failed:  # raised once the other ranks of this replica know
                said, error = _FAILED, failed
        if self._group is not None:
            (said,) = leaders_integers((said,), group=self._group, device=_CPU)
            self._has_told = said == _FAILED
            if said == _NEWS:
                news = broadcast_object(news, src=dist.get_global_rank(self._group, 0), group=self._group)
        if error is not None:
            raise error
        if said == _FAILED:
            raise EngineError("the leading rank of this replica has failed; see its own message")
        self._queue = [request for request in (*self._queue, *news.requests) if request.index not in news.left]
        self._dropped |= news.left
        self._ends = news.is_over and not self._queue and self._given <= self._dropped

    def _news(self, wait_seconds: float) -> _News:
        with self._condition:
            is_over = self._has_ended or self._is_over()
            if wait_seconds and not self._new and not is_over:
                self._condition.wait(wait_seconds)
            requests, self._new = tuple(self._new), []
            left, self._left = frozenset(self._left), set()
        return _News(requests, left, is_over)

    def _answer(self, result: GenResult) -> None:
        call = self._calls.get(result.index)
        if call is not None and len(rest := result.tokens[call.heard :]):
            self.hear(result.index, rest, result.logprobs[call.heard :])
        if (call := self._forget(result.index)) is not None:
            _settle(call.answer, result)

    def _forget(self, index: int) -> _Call | None:
        with self._condition:
            return self._calls.pop(index, None)

    def _leave(self, index: int) -> None:
        """Nobody waits for this response any more. From any thread."""
        with self._condition:
            if self._calls.pop(index, None) is None:
                return
            kept = [request for request in self._new if request.index != index]
            if len(kept) == len(self._new):
                self._left.add(index)
            self._new = kept

    def _fail(self, why: str) -> None:
        with self._condition:
            calls, self._calls = self._calls, {}
            self._refused, self._new = why, []
            self._left |= calls.keys()
        for call in calls.values():
            _settle(call.answer, EngineError(why))

    def _part(self) -> None:
        """After a failure: the other ranks of the replica may wait for news, or have failed too and wait here."""
        if self._group is None or self._has_told:
            return
        with suppress(RuntimeError):  # the others are elsewhere, and fail there
            source, said = dist.get_global_rank(self._group, 0), torch.tensor([_FAILED])
            dist.broadcast(said, src=source, group=self._group, async_op=True).wait(timedelta(seconds=FAREWELL_SECONDS))


def _settle(answer: Future[GenResult], outcome: GenResult | EngineError) -> None:
    with suppress(InvalidStateError):  # its caller has cancelled it
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
