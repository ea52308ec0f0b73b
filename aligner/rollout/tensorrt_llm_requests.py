"""Requests on their way through TensorRT-LLM: submitted as room is free, collected as they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from aligner.errors import EngineError
from aligner.rollout.engine import GenRequest, GenResult, Work
from aligner.rollout.tensorrt_llm_sampling import sampling_arguments, to_result
from aligner.rollout.tensorrt_llm_spmd import Block
from aligner.types import LogprobKind, SamplingConfig

BEAT_SECONDS = 5.0  # how often the ranks that follow hear from the one that leads
ASK_SECONDS = 0.05  # how often more is asked for while some is to come
_WAIT, _END = 0, -1


class Take:
    """The source of requests for all ranks of a replica: only the leader knows when it has room, so it says so to the others first."""

    def __init__(self, work: Work, block: Block) -> None:
        self._work = work
        self._block = block

    @property
    def is_open(self) -> bool:
        """See `Work`."""
        return self._work.is_open

    def requests(self, room: int) -> Sequence[GenRequest]:
        """On the leader: up to `room` (at least 1) more; none if nothing is left."""
        self._block.tell(room)
        return self._work.take(room)

    def heartbeat(self) -> None:
        """On the leader, now and then while it waits: so that the others know it is alive."""
        self._block.tell(_WAIT)

    def end(self) -> None:
        """On the leader, when it is done, or has failed."""
        self._block.tell(_END)

    def follow(self) -> None:
        """On the other ranks, until the leader ends: take part if taking is collective."""
        while (room := self._block.hear()) != _END:
            if room != _WAIT:
                self._work.take(room)


class Requests:
    """One generation of the leader's. `llm` is the package's LLM; `context` is the longest sequence."""

    def __init__(
        self,
        llm: Any,
        sampling: SamplingConfig,
        *,
        eos_id: int,
        context: int,
        kind: LogprobKind,
        version: int,
        timeout_seconds: float,
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._eos_id = eos_id
        self._context = context
        self._kind = kind
        self._version = version
        self._timeout_seconds = timeout_seconds
        self._running: dict[asyncio.Task[Any], tuple[GenRequest, Any]] = {}
        self._heard = time.monotonic()  # when a request ended last, or the first ones began

    def run(self, take: Take, *, limit: int) -> Iterator[list[GenResult]]:
        """Keep `limit` requests in the package until nothing is left to take. Requests that still run on exit are aborted."""
        loop = asyncio.new_event_loop()
        try:
            more = True
            while more or self._running:
                if not self._running:
                    self._heard = time.monotonic()
                if more and len(self._running) < limit:
                    taken = take.requests(limit - len(self._running))
                    more = bool(taken) or take.is_open
                    loop.run_until_complete(self._submit(taken))
                if self._running:
                    asks = more and len(self._running) < limit and take.is_open
                    ended = loop.run_until_complete(self._wait(take, ASK_SECONDS if asks else BEAT_SECONDS))
                    if ended:
                        yield [self._collect(task) for task in ended]
        finally:
            try:
                loop.run_until_complete(self._abort())
            finally:
                loop.close()
                take.end()

    async def _submit(self, requests: Sequence[GenRequest]) -> None:
        """Inside the loop: the package makes a request that can be awaited only if one runs."""
        from tensorrt_llm import SamplingParams

        for request in requests:
            room = self._context - len(request.tokens)
            if not request.tokens or room < 1:
                raise EngineError(
                    f"request {request.index}: a prompt of {len(request.tokens)} tokens leaves no room for a response in {self._context}"
                )
            arguments = sampling_arguments(
                self._sampling,
                request,
                max_tokens=min(self._sampling.longest, room, request.limit or room),
                eos_id=self._eos_id,
                pad_id=self._eos_id,
            )
            handle = self._llm.generate_async(list(request.tokens), SamplingParams(**arguments), streaming=False)
            self._running[asyncio.ensure_future(handle.aresult())] = (request, handle)

    async def _wait(self, take: Take, seconds: float) -> set[asyncio.Task[Any]]:
        """The requests that have ended; waits so long for the first."""
        ended, _ = await asyncio.wait(self._running, timeout=min(seconds, self._timeout_seconds), return_when=asyncio.FIRST_COMPLETED)
        if ended:
            self._heard = time.monotonic()
            return ended
        if time.monotonic() - self._heard < self._timeout_seconds:
            take.heartbeat()
            return ended
        named = ", ".join(str(request.index) for request, _ in list(self._running.values())[:5])
        raise EngineError(
            f"TensorRT-LLM ended none of its {len(self._running)} running requests ({named}, ...) in {self._timeout_seconds:.0f} s: its "
            "executor hangs, or rollout.tensorrt_llm.timeout_seconds is short for rollout.sampling.max_response_length"
        )

    def _collect(self, task: asyncio.Task[Any]) -> GenResult:
        request, handle = self._running.pop(task)
        if error := task.exception():
            raise EngineError(
                f"TensorRT-LLM failed at request {request.index} ({len(request.tokens)} prompt tokens): {type(error).__name__}: {error}"
            ) from error
        return to_result(request, handle.outputs[0], self._sampling, kind=self._kind, eos_id=self._eos_id, version=self._version)

    async def _abort(self) -> None:
        """Take back what still runs, after an error or if the caller wants no more."""
        running, self._running = self._running, {}
        for task, (_, handle) in running.items():
            if not task.done():
                handle.abort()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # they were cancelled, or their error is not the first
