"""Requests on their way through TensorRT-LLM: submitted as room is free, collected as they end.

Sampling settings become TensorRT-LLM's, and its responses ours. A setting that has no exact counterpart is refused by its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aligner.errors import EngineError
from aligner.rollout.engine import GenRequest, GenResult, Work
from aligner.rollout.tensorrt_llm_spmd import Block
from aligner.types import FinishReason, LogprobKind, SamplingConfig

_NO_END = -1  # no end-of-sequence token of its own: all that stop are stop tokens, which stay in the response
_SEED_BITS = (1 << 63) - 1


def stop_ids(sampling: SamplingConfig, eos_id: int) -> list[int]:
    """The tokens that end a response."""
    return sorted({eos_id, *sampling.stop_token_ids})


def sampling_arguments(sampling: SamplingConfig, request: GenRequest, *, max_tokens: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Keyword arguments of the package's SamplingParams for one request."""
    drawn: dict[str, Any] = {"top_k": 1}  # greedy in either sampler, whatever else is left unset
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed & _SEED_BITS}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k else {}
        drawn |= {"min_p": sampling.min_p} if sampling.min_p else {}
    return drawn | {
        "max_tokens": max_tokens,
        "end_id": _NO_END,
        "pad_id": pad_id,
        "stop_token_ids": stop_ids(sampling, eos_id),
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def to_result(request: GenRequest, output: Any, sampling: SamplingConfig, *, kind: LogprobKind, eos_id: int, version: int) -> GenResult:
    """The package's CompletionOutput as ours. Raises EngineError for one that ended in another way than by a stop token or its length."""
    tokens = tuple(output.token_ids)
    logprobs = tuple(_logprob(entry, token) for entry, token in zip(output.logprobs, tokens, strict=False))
    if not tokens or len(logprobs) != len(tokens):
        raise EngineError(f"TensorRT-LLM gave {len(logprobs)} log-probs for the {len(tokens)} tokens of request {request.index}")
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"TensorRT-LLM ended request {request.index} after {len(tokens)} tokens: finish_reason={output.finish_reason!r}")
    stopped = tokens[-1] in stop_ids(sampling, eos_id)  # also where that was at the very limit, which the package calls its length
    return GenResult(
        index=request.index,
        tokens=tokens,
        logprobs=logprobs,
        kind=kind,
        finish_reason=FinishReason.stop if stopped else FinishReason.length,
        weight_version=version,
        raw_logprobs=logprobs if sampling.raw_logprobs else None,
    )


def _logprob(entry: Any, token: int) -> float:
    """One position's: a number, or by token, with the sampled one among them."""
    return float(entry[token].logprob) if isinstance(entry, Mapping) else float(entry)


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
