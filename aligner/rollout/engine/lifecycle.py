"""Keeps a rollout engine to the order of its phases, with the same outcome of each phase on all ranks.

    wake(weights) -> refit -> wake(kv_cache) -> generate -> sleep

`wake()` performs the first three, so an algorithm calls `refit`, `wake`, `generate`, `sleep`. Without `rollout.offload` nothing is ever
released: a refit happens at once, and `wake` and `sleep` do nothing. A refit that fails on any rank fails on all, and leaves weights of two
versions: nothing is generated until another one succeeds.

With a `Gate`, another thread may generate meanwhile: a refit then comes between two of its steps, and `wake` waits for its generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields

from aligner.errors import EngineError
from aligner.parallel.collectives import together
from aligner.protocols import Replica
from aligner.rollout.engine import ALL_MEMORY, Engine, EngineSampling, GenRequest, GenResult, Memory, Work, callers_of
from aligner.rollout.engine.episodes import Conversing, Episodes, EpisodeWork
from aligner.rollout.engine.gate import Gate
from aligner.rollout.engine.work import WorkSharing
from aligner.telemetry import recording
from aligner.types import Images, Prompt, Rollout, SamplingConfig

_WEIGHTS, _CACHE = frozenset({Memory.weights}), frozenset({Memory.kv_cache})


class RecordedWork:
    """Wraps a `Work`; on the replica's leading rank each request becomes a span, from when the engine takes it until its response ends. A
    turn of an episode is a request of its own."""

    def __init__(self, work: Work, replica: Replica) -> None:
        self._work, self.callers = work, callers_of(work)
        self._lane = f"replica {replica.index}"
        self._taken: dict[int, tuple[float, int]] = {}  # start, and tokens of the prompt
        self._records = replica.is_leader and recording.is_on()

    @property
    def is_open(self) -> bool:
        return self._work.is_open

    def take(self, room: int) -> Sequence[GenRequest]:
        requests = self._work.take(room)
        if self._records and requests:
            now = time.perf_counter()
            self._taken |= {request.index: (now, len(request.tokens)) for request in requests}
        return requests

    def ended(self, results: Sequence[GenResult]) -> None:
        for result in results:
            if result.index not in self._taken:
                continue
            start, prompt = self._taken.pop(result.index)
            recording.add("response", start, self._lane, prompt=prompt, tokens=len(result.tokens), ended_by=result.finish_reason.value)


class PhasedEngine:
    """`aligner.protocols.RolloutEngine`. Every method is collective over the component; errors are raised on every rank.

    `offload`: device memory is released between generations, and the engine starts asleep. Otherwise everything is awake, and the
    constructor refits for the first time. `gate`: another thread calls `generate`, except for validation. `conversing`: samples multi-turn
    episodes with an environment. `end_ids` end a response besides the sampling's own stop tokens; ids in `missing` stand for no token, and
    an engine that samples one fails.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingConfig,
        sharing: WorkSharing,
        *,
        offload: bool,
        gate: Gate | None = None,
        conversing: Conversing | None = None,
        end_ids: Sequence[int] = (),
        missing: Sequence[int] = (),
    ) -> None:
        self.engine, self.replica, self.capabilities = engine, engine.replica, engine.capabilities
        self.gate = gate
        self.conversing = conversing
        self.sampling = sampling
        self._end_ids, self._missing = tuple(end_ids), frozenset(missing)
        self.version = 0
        self.refitted_bytes = 0  # copied by the last refit
        self._sharing = sharing
        self._offload = offload
        self._awake = frozenset() if offload else ALL_MEMORY
        self._is_due = True  # the weights are not of `version` yet
        self._poison = ""
        self._generating_in: int | None = None  # thread
        self._has_ended = False
        if not offload:
            self._refill()

    def refit(self, version: int) -> None:
        """Sample from the policy's current weights, of optimizer step `version`; sleeping weights are refitted when they wake. A
        generation in another thread continues with the new ones.

        Raises EngineError on all ranks if it fails on any, during a generation, and if a cache that can sleep is awake: it belongs to
        other weights, and the policy's may be away.
        """
        self._refuse_unless_idle("take new weights")
        if self._offload and Memory.kv_cache in self._awake:
            raise EngineError("the rollout engine was asked to take new weights while it is ready to generate: sleep() it first")
        with self._held(version):
            self.version, self._is_due = version, True
            if Memory.weights in self._awake:
                self._refill()

    def wake(self) -> None:
        """Allocate the released memory and be ready to generate, once the expected generations of another thread have ended."""
        self._refuse_unless_idle("wake")
        if self.gate is not None:
            together(self.gate.drain, "waiting for the rollout engine", error=EngineError)
        if Memory.weights not in self._awake:
            together(lambda: self.engine.wake(_WEIGHTS), "waking the rollout engine's weights", error=EngineError)
            self._awake |= _WEIGHTS
        if self._awake == ALL_MEMORY:
            return
        if self._is_due:
            self._refill()
        together(lambda: self.engine.wake(_CACHE), "waking the rollout engine's cache", error=EngineError)
        self._awake |= _CACHE

    def sleep(self) -> None:
        """Release device memory, if `rollout.offload` is set. Raises EngineError during a generation."""
        self._refuse_unless_idle("sleep")
        if self._offload and self._awake:
            together(lambda: self.engine.sleep(self._awake), "putting the rollout engine to sleep", error=EngineError)
            self._awake, self._is_due = frozenset(), True

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One response per (prompt, seed), yielded as they end, in any order. One replica yields each, on all of its ranks, or for episodes
        of several turns on its leading rank only.

        Every rank passes the same whole lists and consumes the iterator. `sampling` replaces the engine's own settings for this call.
        Raises EngineError out of order, after a failed refit, and naming a prompt that leaves no room for a response; an environment's
        error on the leading rank of its replica.
        """
        self._refuse_unless_ready()
        for prompt in prompts:
            if not 0 < len(prompt.tokens) < self.engine.max_sequence_length:
                length, context = len(prompt.tokens), self.engine.max_sequence_length
                raise EngineError(f"{prompt.source}: a prompt of {length} tokens leaves no room in the context of {context}")
            if Images.name in prompt.extras and not self.capabilities.sees:
                raise EngineError(f"{prompt.source}: has images, which rollout.engine={self.capabilities.name} does not read")
        requests = [
            GenRequest(index=index, tokens=prompt.tokens, seed=seed, extras=prompt.extras)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        sampling = self.complete(sampling or self.sampling)
        if self.conversing is None:
            return self._rollouts(requests, prompts, sampling)
        return self._episodes(requests, prompts, sampling, self.conversing)

    def serve(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Responses to the requests of `work`, whose settings are `complete`. Collective over the replica. Raises as `generate` does."""
        self._refuse_unless_ready()
        with self._generating():
            yield from self._results(work, self.complete(sampling))

    def shutdown(self) -> None:
        """Release everything for good; afterwards only `shutdown` may be called. Not collective: each rank ends its own part (together with
        the other ranks of its replica, if another thread generates)."""
        self._has_ended = True
        if self.gate is not None:
            self.gate.stop()
            self.gate.drain()
        self.engine.shutdown()

    def complete(self, sampling: SamplingConfig) -> SamplingConfig:
        """With the tokenizer's end tokens, and the ids that are never drawn."""
        if not self._end_ids and not self._missing:
            return sampling
        given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        given |= {"stop_token_ids": [*sampling.stop_token_ids, *self._end_ids], "missing_ids": tuple(sorted(self._missing))}
        return EngineSampling(**given)

    def _rollouts(self, requests: list[GenRequest], prompts: Sequence[Prompt], sampling: SamplingConfig) -> Iterator[list[Rollout]]:
        with self._generating(), self._sharing.open(requests) as work:
            for results in self._results(work, sampling):
                yield [
                    Rollout(
                        prompt=prompts[result.index],
                        response=result.tokens,
                        logprobs=result.logprobs,
                        finish_reason=result.finish_reason,
                        policy_version=result.weight_version,
                        oldest_version=result.versions[0][1] if result.versions else None,
                        seed=requests[result.index].seed,
                        logprob_kind=result.kind,
                        extras=result.extras,
                    )
                    for result in results
                ]

    def _episodes(
        self, requests: list[GenRequest], prompts: Sequence[Prompt], sampling: SamplingConfig, conversing: Conversing
    ) -> Iterator[list[Rollout]]:
        limits = [min(sampling.longest, self.engine.max_sequence_length - len(request.tokens)) for request in requests]
        with self._generating(), self._sharing.open(requests) as shared, closing(conversing.follow_up.open()) as exchange:
            episodes = None
            if self.replica.is_leader:
                episodes = Episodes(exchange, prompts, requests, limits, max_turns=conversing.follow_up.max_turns)
            for results in self._results(EpisodeWork(shared, conversing, episodes), sampling):
                if episodes is not None:
                    episodes.record(results)
                    if ended := episodes.take_ended():
                        yield ended
            if episodes is not None and (ended := episodes.take_ended()):
                yield ended

    def _results(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        requests = RecordedWork(work, self.replica)
        for results in self.engine.generate(requests, sampling):
            requests.ended(results)
            for result in results:
                if ids := sorted(self._missing.intersection(result.tokens)):
                    raise EngineError(f"{self.capabilities.name} sampled ids that stand for no token of the tokenizer: {ids[:5]}")
                if result.weight_version != self.version and self.gate is None:
                    raise EngineError(f"the rollout engine sampled from weights of version {result.weight_version}, not of {self.version}")
            yield results

    @contextmanager
    def _generating(self) -> Iterator[None]:
        self._generating_in = threading.get_ident()
        try:
            yield
        finally:
            self._generating_in = None

    @contextmanager
    def _held(self, version: int) -> Iterator[None]:
        """In the block no other thread generates; afterwards it continues with weights of `version`."""
        if self.gate is None:
            yield
            return
        together(self.gate.hold, "holding the rollout engine", error=EngineError)
        try:
            yield
        except BaseException as error:
            self.gate.release(version, broken=str(error))
            raise
        self.gate.release(version)

    def _refill(self) -> None:
        try:
            with recording.span("refit", version=self.version) as said:
                self.refitted_bytes = said["bytes"] = together(
                    lambda: self.engine.refit(self.version), f"the refit with the weights of version {self.version}", error=EngineError
                )
        except EngineError as error:
            self._poison = str(error)
            raise
        self._poison, self._is_due = "", False

    def _refuse_unless_ready(self) -> None:
        self._refuse_unless_idle("generate")
        if self._poison:
            raise EngineError(f"the rollout engine does not generate: its last refit failed ({self._poison}); refit() it again")
        if self._awake != ALL_MEMORY:
            raise EngineError("the rollout engine was asked to generate while it sleeps: wake() it first")

    def _refuse_unless_idle(self, what: str) -> None:
        if self._has_ended:
            raise EngineError(f"the rollout engine was asked to {what} after its shutdown: make another one")
        if self._generating_in is not None and (self.gate is None or self._generating_in == threading.get_ident()):
            raise EngineError(f"the rollout engine was asked to {what} during a generation: consume generate() to its end, or close it")
