"""Requests to TensorRT-LLM, as room is free, and their results. A setting without an exact counterpart is refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from aligner.errors import EngineError
from aligner.parallel.collectives import leaders_integers
from aligner.rollout.engine import GenRequest, GenResult, Work, limit_of, missing_ids
from aligner.rollout.tensorrt_llm.link import Link
from aligner.types import FinishReason, LogprobKind, SamplingConfig

_NO_END = -1  # no end-of-sequence token: all are stop tokens, which stay in the response
_SEED_BITS = (1 << 63) - 1


def stop_ids(sampling: SamplingConfig, eos_id: int) -> list[int]:
    return sorted({eos_id, *sampling.stop_token_ids})


def sampling_arguments(sampling: SamplingConfig, request: GenRequest, *, max_tokens: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Keyword arguments of the package's SamplingParams for one request."""
    drawn: dict[str, Any] = {"top_k": 1}  # greedy in either sampler
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed & _SEED_BITS}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k else {}
        drawn |= {"min_p": sampling.min_p} if sampling.min_p else {}
    drawn |= {"bad_token_ids": list(gaps)} if (gaps := missing_ids(sampling)) else {}
    return drawn | {
        "max_tokens": max_tokens,
        "end_id": _NO_END,
        "pad_id": pad_id,
        "stop_token_ids": stop_ids(sampling, eos_id),
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


Answer = tuple[tuple[int, ...], tuple[float, ...], str]  # tokens, their log-probs, the package's reason for the end


def to_result(request: GenRequest, answer: Answer, sampling: SamplingConfig, *, kind: LogprobKind, eos_id: int, version: int) -> GenResult:
    """Convert the package's answer. Raises EngineError if it did not end by a stop token or its length."""
    tokens, logprobs, reason = answer
    if not tokens or len(logprobs) != len(tokens):
        raise EngineError(f"TensorRT-LLM gave {len(logprobs)} log-probs for the {len(tokens)} tokens of request {request.index}")
    if reason not in ("stop", "length"):
        raise EngineError(f"TensorRT-LLM ended request {request.index} after {len(tokens)} tokens: finish_reason={reason!r}")
    stopped = tokens[-1] in stop_ids(sampling, eos_id)  # also at the limit, where the package reports the length
    return GenResult(
        index=request.index,
        tokens=tokens,
        logprobs=logprobs,
        kind=kind,
        finish_reason=FinishReason.stop if stopped else FinishReason.length,
        weight_version=version,
        raw_logprobs=logprobs if sampling.raw_logprobs else None,
    )


BEAT_SECONDS = 5.0  # between messages from the leading rank to the others
ASK_SECONDS = 0.05  # between requests for more work while some may follow
ABORT_SECONDS = 60.0  # for the package's process to withdraw requests
WAIT, END = 0, -1


class Take:
    """The source of requests on all ranks of a replica, whose first rank alone knows its room. `group`: these ranks; None for one."""

    def __init__(self, work: Work, group: dist.ProcessGroup | None) -> None:
        self._work = work
        self._group = group

    @property
    def is_open(self) -> bool:
        return self._work.is_open

    def requests(self, room: int) -> Sequence[GenRequest]:
        """On the first rank: up to `room` (at least 1) more; none if nothing is left."""
        self.tell(room)
        return self._work.take(room)

    def follow(self) -> None:
        """On the other ranks, until the first one ends: take part in collective calls of `take`."""
        while (room := self.tell(END)) != END:
            if room != WAIT:
                self._work.take(room)

    def tell(self, number: int) -> int:
        """The first rank's number on all ranks: its room, WAIT to show that it is alive, END also after an error. Waits up to the group's
        timeout."""
        return number if self._group is None else leaders_integers((number,), group=self._group, device=torch.device("cpu"))[0]


@dataclass(eq=False, slots=True)
class Requests:
    """One generation, on the first rank of a replica. `link` leads to the package's process; `context` is the longest sequence."""

    link: Link
    sampling: SamplingConfig
    _: KW_ONLY
    eos_id: int
    context: int
    kind: LogprobKind
    version: int
    timeout_seconds: float
    _running: dict[int, GenRequest] = field(default_factory=dict, init=False)
    _heard: float = field(default_factory=time.monotonic, init=False)  # when a request ended last, or the first ones began

    def run(self, take: Take, *, limit: int) -> Iterator[list[GenResult]]:
        """Keep `limit` requests in the package until nothing is left to take. Requests that still run on exit are aborted."""
        try:
            more = True
            while more or self._running:
                if not self._running:
                    self._heard = time.monotonic()
                if more and len(self._running) < limit:
                    taken = take.requests(limit - len(self._running))
                    more = bool(taken) or take.is_open
                    self._submit(taken)
                if self._running:
                    asks = more and len(self._running) < limit and take.is_open
                    if ended := self._wait(take, ASK_SECONDS if asks else BEAT_SECONDS):
                        yield ended
        finally:
            try:
                if self._running and not self.link.is_lost:
                    self._abort()
            finally:
                take.tell(END)

    def _submit(self, requests: Sequence[GenRequest]) -> None:
        asked = []
        for request in requests:
            most = limit_of(request, self.sampling, self.context)
            arguments = sampling_arguments(self.sampling, request, max_tokens=most, eos_id=self.eos_id, pad_id=self.eos_id)
            asked.append((request.index, request.tokens, arguments))
        if asked:
            self._running |= {request.index: request for request in requests}
            self.link.send("submit", asked)

    def _wait(self, take: Take, seconds: float) -> list[GenResult]:
        """The requests that have ended; waits at most this long for the first."""
        if self.link.has_message(min(seconds, self.timeout_seconds)):
            self._heard = time.monotonic()
            ended = [self._collect()]
            while self._running and self.link.has_message(0):
                ended.append(self._collect())
            return ended
        if time.monotonic() - self._heard < self.timeout_seconds:
            take.tell(WAIT)
            return []
        named = ", ".join(str(index) for index in list(self._running)[:5])
        raise EngineError(
            f"TensorRT-LLM ended none of its {len(self._running)} running requests ({named}, ...) in {self.timeout_seconds:.0f} s: its "
            "executor hangs, or rollout.tensorrt_llm.timeout_seconds is short for rollout.sampling.max_response_length"
        )

    def _collect(self) -> GenResult:
        kind, index, found = self.link.receive(self.timeout_seconds)
        request = self._running.pop(index)
        if kind == "failed":
            raise EngineError(f"TensorRT-LLM failed at request {index} ({len(request.tokens)} prompt tokens): {found}")
        return to_result(request, found, self.sampling, kind=self.kind, eos_id=self.eos_id, version=self.version)

    def _abort(self) -> None:
        self._running = {}
        self.link.send("abort")
        while self.link.receive(ABORT_SECONDS)[0] != "aborted":
            pass  # results that ended meanwhile
