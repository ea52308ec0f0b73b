"""The interface of a rollout engine: protocols, requests and results.

An engine samples from its own weights or from the policy's in place. `aligner.rollout.engine.lifecycle` enforces the order of a step's
phases: wake the weights, refit, wake the key-value cache, generate, sleep. A failed refit leaves mixed weights, so nothing is generated
until another one succeeds.

The lifecycle drives an `Engine`: the built-in one (`aligner.rollout.builtin.megatron`), or `aligner.rollout.engine.foreign` around a
`ForeignEngine`, which wraps an inference package.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor

from aligner.errors import AlignerError, EngineError
from aligner.protocols import Replica
from aligner.rollout.engine.manifest import Manifest
from aligner.types import FinishReason, LogprobKind, SamplingConfig


class Memory(str, Enum):
    """Memory that an engine can release between two generations."""

    weights = "weights"
    kv_cache = "kv_cache"


ALL_MEMORY = frozenset(Memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """An engine's name, the kind of its log-probs, whether it reads images, and whether single requests have settings and callers."""

    name: str
    logprobs: LogprobKind
    sees: bool = False
    serves: bool = False


@dataclass(kw_only=True, slots=True)
class EngineSampling(SamplingConfig):
    """The settings for an engine, with every end token among `stop_token_ids`. Ids that stand for no token are never drawn."""

    missing_ids: tuple[int, ...] = ()  # those with a row in the engine's model


def missing_ids(sampling: SamplingConfig) -> tuple[int, ...]:
    """Ids that are never drawn; none unless the sampling lists them."""
    return sampling.missing_ids if isinstance(sampling, EngineSampling) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenRequest:
    """A request for one response; `index` is the caller's name for it. With `sampling` it has settings of its own, and gets what it would
    get in a run with these; the run's `max_response_length` limits it too."""

    index: int
    tokens: tuple[int, ...]
    seed: int
    limit: int | None = None  # the most tokens of this response, if fewer than the sampling allows
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False)  # the prompt's (`aligner.types.extras`)
    sampling: SamplingConfig | None = None
    top: int = 0  # tokens that `Callers.hear` names in each place


Likeliest = Sequence[tuple[int, float]]  # of one place the likeliest tokens and their log-probs, of the kind of a result's


def limit_of(request: GenRequest, sampling: SamplingConfig, context: int) -> int:
    """The most tokens of the response, in a run with `sampling`. Raises EngineError for a prompt that is empty or leaves no room."""
    length = len(request.tokens)
    if not 0 < length < context:
        raise EngineError(f"request {request.index}: a prompt of {length} tokens leaves no room in the context of {context}")
    own = sampling if request.sampling is None else request.sampling
    most = min(sampling.longest, own.longest, context - length)
    return most if request.limit is None else min(most, request.limit)


def check_ids(request: GenRequest, vocab_size: int) -> None:
    """Raise EngineError for a request with ids that are no tokens of the model."""
    if bad := [token for token in request.tokens if not 0 <= token < vocab_size]:
        raise EngineError(f"request {request.index}: the token ids {bad[:3]} are none of the model's, allowed: 0 to {vocab_size - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenResult:
    """One finished response. `logprobs` belong to the sampled tokens and are of `kind`; `raw_logprobs` at temperature 1 if the engine gives
    both.

    If the weights changed meanwhile, `versions` has (number of the first token, version) for each stretch from the same weights, and
    `weight_version` is the last one's; else it is empty. `extras`: see `aligner.types.Rollout`.
    """

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    kind: LogprobKind
    finish_reason: FinishReason
    weight_version: int
    raw_logprobs: tuple[float, ...] | None = None
    versions: tuple[tuple[int, int], ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("logprobs", "raw_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"GenResult.{name} has {len(values)} entries for {len(self.tokens)} tokens")


class Work(Protocol):
    """The source of an engine's requests: a list, a queue that several replicas share, or episodes whose turns follow one another."""

    is_open: bool  # whether a later `take` may give requests after one gave none: responses that end may be followed by more

    def take(self, room: int) -> Sequence[GenRequest]:
        """Up to `room` (at least 1) more requests, all requests of one prompt together; none if nothing is left or, with `is_open`, if
        nothing is ready. May wait a moment if no request is unfinished. A request has ended when the engine yields its result.

        Every rank of a replica calls it at the same point with the same `room` and gets the same requests.
        """


class Callers(Protocol):
    """Those who wait for the responses to a `Work`, each for one. Every rank of a replica calls these methods at the same points."""

    def left(self) -> Collection[int]:
        """Taken requests that nobody waits for any more: they end without a result. Called before each step."""

    def refuse(self, index: int, error: AlignerError) -> None:
        """This request cannot be answered; the others continue."""

    def hear(self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Likeliest] = ()) -> None:
        """The next tokens of a response; `tops` for each token, if its request asks for them."""


def callers_of(work: Work) -> Callers | None:
    """None: the first error ends the generation, and results come as a whole."""
    return getattr(work, "callers", None)


class ListedWork:
    """A fixed list of requests, for one replica."""

    is_open = False

    def __init__(self, requests: Sequence[GenRequest]) -> None:
        self._requests = list(requests)

    def take(self, room: int) -> Sequence[GenRequest]:
        taken, self._requests = self._requests[:room], self._requests[room:]
        return taken


class Sampling(Protocol):
    """The common part of `Engine` and `ForeignEngine`."""

    capabilities: Capabilities
    max_sequence_length: int  # tokens of prompt and response together

    def wake(self, memory: frozenset[Memory]) -> None:
        """Allocate the named memory, which is asleep. Weights may hold anything until the next refit, which precedes any generation."""

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release the named memory, which is awake, as far as the engine can; contents are lost."""

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Take requests as room is free and yield finished ones as they end, in any order, until `work` has none left.

        Every rank of the replica consumes the iterator. Every result's `weight_version` is the last refit's.
        """

    def shutdown(self) -> None:
        """End the engine's threads and release everything for good. May be called at any time, and twice."""


class Engine(Sampling, Protocol):
    """An engine on one rank. `refit`, `wake` and `sleep` are collective over the component, `generate` over a replica."""

    replica: Replica

    def refit(self, version: int) -> int:
        """Take the policy's current weights, of optimizer step `version`; returns the bytes copied on this rank. Called with the weights
        awake, outside a generation. Raises if it fails; then the weights are mixed."""


class Receiver(Protocol):
    """Where a stream of a refit goes: an engine, or the adapters of one (in PEFT's names, with the scaling in the B's)."""

    def begin_refit(self, manifest: Manifest) -> None:
        """Prepare for exactly these tensors (Hugging Face names, full shapes). Acquire here anything that training must not find held."""

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy these full, contiguous tensors into the engine's weights: whole fusion groups, names and shapes checked before. When it
        returns, the tensors may be overwritten. Must not wait for other ranks: if one fails, it is not called there again."""

    def finish_refit(self, version: int) -> None:
        """All buckets have arrived, on every rank: finish the load and forget cached prefixes. Later results have this `version`."""

    def abort_refit(self) -> None:
        """The refit failed on some rank: undo what `begin_refit` entered, whatever became of the other methods on this rank."""

    def read_back(self, name: str) -> Tensor | None:
        """The engine's weight of this Hugging Face name, full and in its dtype, for verification after `finish_refit`; None if it
        cannot be recovered from the engine's form (quantized, split over ranks)."""


class ForeignEngine(Sampling, Receiver, Protocol):
    """An inference package in or beside the training processes, with its own weights: one replica's engine on one of its ranks.

    An engine that also takes a policy's adapters without the weights has a `Receiver` of them after `start`, as `adapters`.

    Constructing it must import nothing of the package and allocate nothing on the device. Calls come in this order, on every rank of the
    replica: `start`; then for each refit `begin_refit`, `load` for each bucket, `finish_refit` (or `abort_refit` after a failure on any
    rank of the component), with the weights awake, and the cache asleep if `sleep` was called since; `generate`; `sleep`, `wake`.
    An error of a method is raised on every rank of the component and, from `begin_refit` to `finish_refit`, forbids generating.
    """

    def start(self) -> None:
        """Import the package and build the model with arbitrary weights. Afterwards everything is awake."""
