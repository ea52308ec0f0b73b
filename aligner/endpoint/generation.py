"""The responses to one request, sampled by the engine's thread and read in the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from aligner.endpoint.requests import Ask, Likeliest, Model
from aligner.endpoint.sessions import Call, KeptSessions
from aligner.endpoint.text import CALL, Piece, Reply
from aligner.errors import AlignerError, EngineError
from aligner.rollout.engine import GenResult
from aligner.rollout.live import LiveRequest
from aligner.servers.gateway import Refusal

T = TypeVar("T")
RETRY = {"Retry-After": "1"}
TURN_SECONDS, LONGEST_TURN = 0.04, 0.2  # tokens that the engine gives a stream within a turn are one event
WORK_SHARE = 40  # of a turn: the event loop's work, times this, is the least that is left to the engine's thread


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of `n` responses: the request's own for the first, others derived from it."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big", signed=True)


class Inbox:
    """What other threads want done in the event loop: at once, or in turns, which keep the engine's thread from Python least."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._urgent: deque[Callable[[], None]] = deque()
        self._waiting: deque[Callable[[], None]] = deque()
        self._has_called = False
        self._end: asyncio.TimerHandle | None = None  # of the turn, as long as calls come
        self._began = self._worked = self._used = 0.0  # the turn: when, and this thread's and the process's CPU time then
        self._thread = ThreadPoolExecutor(1, "endpoint")

    def put(self, call: Callable[[], None], *, at_once: bool = True) -> None:
        """From any thread: done now, together with all that is, or else at the turn's end."""
        (self._urgent if at_once else self._waiting).append(call)
        if not self._has_called and (at_once or self._end is None):
            self._has_called = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._run)

    async def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """In a thread of its own, one call at a time: what would hold up the other requests."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """Take no more calls of `compute`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        self._has_called = False
        if self._end is None:
            self._next_turn()
        while self._urgent:
            self._urgent.popleft()()

    def _next_turn(self) -> None:
        """End a turn, unless the other threads have had too little of it: at least WORK_SHARE times what this one worked."""
        now, worked, used = time.monotonic(), time.thread_time(), time.process_time()
        own, length = worked - self._worked, now - self._began
        if min(length, used - self._used - own) < WORK_SHARE * own and length < LONGEST_TURN:
            self._end = self._loop.call_later(TURN_SECONDS / 4, self._next_turn)
            return
        self._began, self._worked, self._used = now, worked, used
        self._end = self._loop.call_later(TURN_SECONDS, self._next_turn) if self._waiting else None  # before the last look at what waits
        while self._waiting:
            self._waiting.popleft()()


@dataclass(kw_only=True, eq=False, slots=True)
class Choice:
    """One response: `index` among those of the request."""

    index: int
    prompt: tuple[int, ...]
    seed: int
    reply: Reply
    future: Future[GenResult] | None = None
    result: GenResult | None = None
    ids: list[int] = field(default_factory=list)  # told by the engine's thread, as are their log-probs, which come last
    logprobs: list[float] = field(default_factory=list)
    tops: list[Likeliest] = field(default_factory=list)  # the likeliest tokens in the places of the response's, if they are asked for
    known: tuple[list[float], list[Likeliest]] | None = None  # the same of the prompt but its first token

    @property
    def finish_reason(self) -> str:
        return "length" if self.result is None else self.reply.finish_reason(self.result)


@dataclass(frozen=True, slots=True)
class Step:
    """What a choice has grown by; with the last step it has its `result`."""

    choice: Choice
    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Likeliest]
    pieces: list[Piece]
    is_last: bool


class Edge(Enum):
    """What happens to a block of a response."""

    begin, grow, end = range(3)


@dataclass(kw_only=True, eq=False)
class Generation:
    """A context: leaving it drops the responses that are not finished. Raises Refusal."""

    model: Model
    ask: Ask
    inbox: Inbox
    sessions: KeptSessions | None = None
    session: str = ""
    choices: list[Choice] = field(default_factory=list)
    _has_grown: asyncio.Event = field(default_factory=asyncio.Event)
    _is_due: bool = False  # whether the event loop is going to look at the responses
    _error: BaseException | None = None

    _unseeded = itertools.count()

    async def __aenter__(self) -> Generation:
        ask = self.ask
        if self.sessions is not None and self.session:
            ask.sampling = self.sessions.settings(self.session, ask.sampling)
        try:
            for prompt in ask.prompts:
                given = self.sessions.begin(self.session, prompt) if self.sessions is not None and self.session else None
                seed = ask.seed if given is None else given
                seed = self._own_seed() if seed is None else seed
                for number in range(ask.n):
                    reply = Reply(
                        tokenizer=self.model.tokenizer,
                        prompt=prompt,
                        stops=ask.sampling.stop_strings,
                        thinks=ask.thinks,
                        has_tools=bool(ask.tools),
                        skip_special=ask.skip_special,
                    )
                    self.choices.append(Choice(index=len(self.choices), prompt=prompt, seed=choice_seed(seed, number), reply=reply))
            for choice in self.choices if ask.samples else ():
                self._submit(choice)
        except EngineError as error:
            await self.__aexit__()
            raise Refusal(503, str(error), RETRY) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        for choice in self.choices:
            if choice.future is not None and choice.result is None:
                choice.future.cancel()

    def _own_seed(self) -> int:
        """For a request without one."""
        return secrets.randbits(63) if self.model.seed is None else choice_seed(self.model.seed, 1 + next(self._unseeded))

    def _submit(self, choice: Choice) -> None:
        ask, told = self.ask, partial(self._tell, choice) if self.ask.stream or self.ask.top else None
        how = {"sampling": ask.sampling, "extras": ask.extras, "top": ask.top, "on_tokens": told}
        choice.future = self.model.live.submit(LiveRequest(tokens=choice.prompt, seed=choice.seed, **how))
        choice.future.add_done_callback(lambda _: self.inbox.put(partial(self._ended, choice)))

    def _tell(self, choice: Choice, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Likeliest]) -> None:
        """In the engine's thread."""
        is_first = not choice.ids
        choice.ids += ids
        choice.tops += tops
        choice.logprobs += logprobs
        if is_first or not self._is_due:
            self._is_due = True
            self.inbox.put(self._grown, at_once=is_first)

    def _grown(self) -> None:
        """In the event loop."""
        self._is_due = False  # before the responses are looked at: what comes from here on is told again
        self._has_grown.set()

    def _ended(self, choice: Choice) -> None:
        """In the event loop, also if the client has gone."""
        if choice.future is None or choice.future.cancelled():
            return
        try:
            choice.result = choice.future.result()
            if self.sessions is not None:
                about = {"session": self.session, "prompt": choice.prompt, "seed": choice.seed, "sampling": self.ask.sampling}
                self.sessions.record(Call(**about, result=choice.result, extras=self.ask.extras, messages=self.ask.messages))
        except BaseException as error:
            if not isinstance(error, AlignerError):
                traceback.print_exc(file=sys.stderr)
            self._error = error
        self._has_grown.set()

    async def steps(self) -> AsyncIterator[Step]:
        """The responses as they grow, until all have ended. Raises Refusal if the engine fails."""
        left = list(self.choices) if self.ask.samples else []
        while left:
            await self._has_grown.wait()
            self._has_grown.clear()
            if self._error is not None:
                raise Refusal(503 if isinstance(self._error, EngineError) else 500, str(self._error), RETRY) from self._error
            for choice in left[:]:
                known, told = choice.reply.num_tokens, len(choice.logprobs)
                if choice.result is not None:
                    left.remove(choice)
                    pieces = choice.reply.close(choice.result)
                    yield Step(choice, choice.result.tokens[known:], choice.result.logprobs[known:], choice.tops[known:], pieces, True)
                elif told > known:
                    ids = choice.ids[known:told]
                    yield Step(choice, ids, choice.logprobs[known:told], choice.tops[known:told], choice.reply.feed(ids), False)

    async def end(self) -> None:
        """Wait until all have ended, and look up the log-probs of prompts. Raises Refusal if the engine fails."""
        async for _ in self.steps():
            pass
        if self.model.score is not None and self.ask.echo and self.ask.logprobs:
            found = await self.inbox.compute(self.model.score, [one.prompt for one in self.choices], max(1, self.ask.top))
            for choice, *known in zip(self.choices, *found, strict=True):
                choice.known = tuple(known)

    async def blocks(self) -> AsyncIterator[tuple[Edge, int, Piece]]:
        """The only response in blocks: where one begins, what it grows by, and at its end the whole, each with the block's number."""
        number, whole = -1, Piece("")
        async for step in self.steps():
            for piece in step.pieces:
                if piece.kind != whole.kind or piece.kind == CALL:
                    if whole.kind:
                        yield Edge.end, number, whole
                    number, whole = number + 1, replace(piece, text="")
                    yield Edge.begin, number, whole
                whole = replace(whole, text=whole.text + piece.text)
                yield Edge.grow, number, piece
        if whole.kind:
            yield Edge.end, number, whole

    @property
    def is_growing(self) -> bool:
        return any(choice.result is None for choice in self.choices)

    @property
    def version(self) -> int:
        """Of the newest weights that sampled."""
        return max((one.result.weight_version for one in self.choices if one.result is not None), default=self.model.live.version)

    def usage(self) -> tuple[int, int]:
        """Tokens of the prompts and of the responses so far."""
        return sum(map(len, self.ask.prompts)), sum(choice.reply.num_tokens for choice in self.choices)
