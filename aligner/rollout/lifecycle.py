"""Holds a rollout engine to the order of its phases, and all ranks to one answer about each of them.

    wake(weights) -> refit -> wake(kv_cache) -> generate -> sleep

`wake()` goes through the first three where they are due, so an algorithm says `refit`, `wake`, `generate`, `sleep`. Without
`rollout.offload` nothing is ever given back: a refit happens at once, and `wake` and `sleep` do nothing. A refit that fails on any rank
fails on all, and leaves weights of two versions: until another one succeeds nothing is generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from aligner.errors import EngineError
from aligner.parallel.together import together
from aligner.protocols import Replica
from aligner.rollout.engine import ALL_MEMORY, Capabilities, Engine, GenRequest, GenResult, Memory, Refitted, Work
from aligner.types import Prompt, Rollout, SamplingConfig

_WEIGHTS, _CACHE = frozenset({Memory.weights}), frozenset({Memory.kv_cache})


class Sharing(Protocol):
    """How the replicas share the requests of a generation; `aligner.rollout.work.WorkSharing`."""

    def open(self, requests: Sequence[GenRequest]) -> AbstractContextManager[Work]:
        """What this replica takes of them. Every rank calls it with the same requests."""


class PhasedEngine:
    """`aligner.protocols.RolloutEngine`. Every method is collective over the component; errors are raised on every rank.

    `offload`: device memory is given back between generations; the engine's starts out asleep. Otherwise everything is awake, and
    constructing this refits for the first time.
    """

    def __init__(self, engine: Engine, sampling: SamplingConfig, sharing: Sharing, *, offload: bool) -> None:
        self.engine = engine
        self.sampling = sampling
        self.version = 0
        self.refitted = Refitted(num_bytes=0, seconds=0.0)  # what the last refit moved
        self._sharing = sharing
        self._offload = offload
        self._awake = frozenset() if offload else ALL_MEMORY
        self._is_due = True  # weights are not those of `version` yet
        self._poison = ""
        self._is_generating = self._has_ended = False
        if not offload:
            self._refill()

    @property
    def replica(self) -> Replica:
        """Which of the engine's replicas this rank belongs to."""
        return self.engine.replica

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.engine.capabilities

    def refit(self, version: int) -> None:
        """Sample from the policy's current weights, of optimizer step `version`; where the weights are asleep, from when they wake.

        Raises EngineError where it fails on any rank (on all of them), while something is generated, and where a cache that can sleep is
        awake: it is of other weights, and the policy's may be away.
        """
        self._refuse_unless_idle("take new weights")
        if self._offload and Memory.kv_cache in self._awake:
            raise EngineError("the rollout engine was asked to take new weights while it is ready to generate: sleep() it first")
        self.version, self._is_due = version, True
        if Memory.weights in self._awake:
            self._refill()

    def wake(self, memory: frozenset[Memory] = ALL_MEMORY) -> None:
        """Take device memory again; with the cache, be ready to generate from the policy's weights of now. What is awake stays as it is.

        Waking everything refits where that is due. Raises EngineError for a cache that is to wake before the weights have and are refitted.
        """
        self._refuse_unless_idle("wake")
        if Memory.weights in memory - self._awake:
            together(lambda: self.engine.wake(_WEIGHTS), "waking the rollout engine's weights", error=EngineError)
            self._awake |= _WEIGHTS
        if Memory.kv_cache not in memory - self._awake:
            return
        if Memory.weights not in self._awake:
            raise EngineError("the rollout engine's cache was asked to wake while its weights are asleep: wake the weights first")
        if self._is_due:
            if Memory.weights not in memory:
                raise EngineError("the rollout engine's cache was asked to wake before its weights are the policy's: refit() first")
            self._refill()
        together(lambda: self.engine.wake(_CACHE), "waking the rollout engine's cache", error=EngineError)
        self._awake |= _CACHE

    def sleep(self, memory: frozenset[Memory] = ALL_MEMORY) -> None:
        """Give back device memory, where `rollout.offload` asks for it. Raises EngineError while something is generated, and for weights
        that are to sleep before the cache."""
        self._refuse_unless_idle("sleep")
        given = memory & self._awake
        if not self._offload or not given:
            return
        if Memory.kv_cache in self._awake - given:
            raise EngineError("the rollout engine's weights were asked to sleep while its cache is awake: put the cache to sleep first")
        together(lambda: self.engine.sleep(given), "putting the rollout engine to sleep", error=EngineError)
        self._awake -= given
        self._is_due |= Memory.weights in given

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One response per (prompt, seed), yielded as they end, in any order, each by one replica: on all of its ranks.

        Every rank passes the same whole lists, and consumes what it is given to the end. `sampling` replaces the engine's own settings for
        this call. Raises EngineError out of order, after a refit that failed, and naming a prompt that leaves no room for a response.
        """
        self._refuse_unless_idle("generate")
        if self._poison:
            raise EngineError(f"the rollout engine does not generate: its last refit failed ({self._poison}); refit() it again")
        if self._awake != ALL_MEMORY:
            raise EngineError("the rollout engine was asked to generate while it sleeps: wake() it first")
        for prompt in prompts:
            if not 0 < len(prompt.tokens) < self.engine.max_sequence_length:
                raise EngineError(
                    f"{prompt.source}: a prompt of {len(prompt.tokens)} tokens leaves no room for a response in the context of "
                    f"{self.engine.max_sequence_length}"
                )
        requests = [
            GenRequest(index=index, tokens=prompt.tokens, seed=seed)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return self._rollouts(requests, prompts, sampling or self.sampling)

    def shutdown(self) -> None:
        """Give everything back for good; afterwards only `shutdown` may be called. Not collective: each rank ends its own part."""
        self._has_ended = True
        self.engine.shutdown()

    def _rollouts(self, requests: list[GenRequest], prompts: Sequence[Prompt], sampling: SamplingConfig) -> Iterator[list[Rollout]]:
        self._is_generating = True
        try:
            with self._sharing.open(requests) as work:
                for results in self.engine.generate(work, sampling):
                    yield [self._rollout(result, prompts[result.index], requests[result.index].seed) for result in results]
        finally:
            self._is_generating = False

    def _rollout(self, result: GenResult, prompt: Prompt, seed: int) -> Rollout:
        if result.weight_version != self.version:
            raise EngineError(f"the rollout engine sampled from weights of version {result.weight_version}, not of {self.version}")
        return Rollout(
            prompt=prompt,
            response=result.tokens,
            logprobs=result.logprobs,
            finish_reason=result.finish_reason,
            policy_version=result.weight_version,
            seed=seed,
            logprob_kind=result.kind,
        )

    def _refill(self) -> None:
        try:
            self.refitted = together(
                lambda: self.engine.refit(self.version), f"the refit with the weights of version {self.version}", error=EngineError
            )
        except EngineError as error:
            self._poison = str(error)
            raise
        self._poison, self._is_due = "", False

    def _refuse_unless_idle(self, what: str) -> None:
        if self._has_ended:
            raise EngineError(f"the rollout engine was asked to {what} after it was shut down: make another one")
        if self._is_generating:
            raise EngineError(f"the rollout engine was asked to {what} while it generates: consume what generate() gives, or close it")
