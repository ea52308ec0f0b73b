"""The interface of a rollout engine: protocols, requests and results.

An engine samples from its own weights or from the policy's in place. The order of a step's phases is fixed: wake the weights, refit,
wake the key-value cache, generate, sleep. `aligner.rollout.engine.lifecycle` enforces it; a refit that fails leaves mixed weights,
so nothing is generated after it until another one succeeds.

The lifecycle drives an `Engine`: the built-in one (`aligner.rollout.builtin.megatron`), or `aligner.rollout.engine.foreign` around a
`ForeignEngine`, which wraps an inference package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor

from aligner.protocols import Replica
from aligner.rollout.engine.manifest import Manifest
from aligner.types import FinishReason, LogprobKind, SamplingConfig


class Memory(str, Enum):
    """Memory that an engine can release between two generations."""

    weights = "weights"
    kv_cache = "kv_cache"


ALL_MEMORY = frozenset(Memory)


class WeightForm(str, Enum):
    """How an engine gets the policy's weights."""

    in_place = "in_place"  # it reads the training parameters: nothing moves
    resharded = "resharded"  # its own, in its own split, filled bucket by bucket from the training shards
    full = "full"  # Hugging Face names and full tensors, streamed


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The capabilities of an engine, for the configuration of a run."""

    name: str
    max_tp: int | None  # ranks that can share one replica; None: as many as the model's sizes allow
    per_request_seeds: bool  # whether a sample depends on its prompt and seed alone
    logprobs: LogprobKind
    weights: WeightForm
    atomic_groups: bool  # whether tensors that the engine fuses (q, k, v; gate, up; a layer's experts) must arrive in one bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Refitted:
    """What one refit moved, on this rank."""

    num_bytes: int  # that were copied into the engine's weights; 0 where it reads the policy's in place
    seconds: float  # until this rank's device had done it


@dataclass(kw_only=True, slots=True)
class EngineSampling(SamplingConfig):
    """The settings that an engine is given, with every end token among `stop_token_ids`. Ids that stand for no token are never drawn."""

    missing_ids: tuple[int, ...] = ()  # those that the engine's model has rows for


def missing_ids(sampling: SamplingConfig) -> tuple[int, ...]:
    """Ids that are never drawn; none if nobody said which."""
    return sampling.missing_ids if isinstance(sampling, EngineSampling) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenRequest:
    """One response that is wanted; `index` is the caller's name for it."""

    index: int
    tokens: tuple[int, ...]
    seed: int
    limit: int | None = None  # tokens of this response, where it may have fewer than the sampling allows
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False)  # the prompt's (`aligner.types.extras`)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenResult:
    """One finished response. `logprobs` are of the sampled tokens, of the kind that is said; `raw_logprobs` at temperature 1 if the
    engine gives both.

    If the weights changed meanwhile, `versions` has (number of the first token, version) of each stretch that was sampled from the same
    ones, and `weight_version` is that of the last; else it is empty. `extras`: see `aligner.types.Rollout`.
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

    is_open: bool  # after a `take` that gave nothing: whether a later one may, since responses that end are followed by more requests

    def take(self, room: int) -> Sequence[GenRequest]:
        """Up to `room` (at least 1) more requests, those of one prompt next to each other; none if nothing is left, or (`is_open`) for
        now: then something that this engine was given before has not ended. What an engine yields has ended.

        Every rank of a replica calls it at the same point with the same `room` and gets the same requests.
        """


class ListedWork:
    """Requests that were known from the start, for one replica."""

    is_open = False

    def __init__(self, requests: Sequence[GenRequest]) -> None:
        self._requests = list(requests)

    def take(self, room: int) -> Sequence[GenRequest]:
        taken, self._requests = self._requests[:room], self._requests[room:]
        return taken


class Engine(Protocol):
    """An engine on one rank, driven by the lifecycle, which alone keeps the order of the phases and calls each method on every rank.

    `refit`, `wake` and `sleep` are collective over the component, `generate` over a replica.
    """

    capabilities: Capabilities
    replica: Replica
    max_sequence_length: int  # tokens of prompt and response together

    def wake(self, memory: frozenset[Memory]) -> None:
        """Allocate what is named, which is asleep. Weights may hold anything until `refit`."""

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release the named memory, which is awake; contents are lost."""

    def refit(self, version: int) -> Refitted:
        """Take the policy's current weights, of optimizer step `version`. Called with the weights awake and nothing being generated.

        Raises if it fails; the weights are mixed then.
        """

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Take requests as room is free and yield finished ones as they end, in any order, until `work` has none left."""

    def shutdown(self) -> None:
        """Give everything back for good. May be called at any time, and twice."""


class ForeignEngine(Protocol):
    """An inference package in or beside the training processes, with its own weights: one replica's engine on one of its ranks.

    Constructing it must import nothing of the package and allocate nothing on the device. Calls come in this order, on every rank of the
    replica: `start`; then for each refit `begin_refit`, `load` for each bucket, `finish_refit` (or `abort_refit` after a failure on any
    rank of the component), with the weights awake, and the cache asleep if `sleep` was called since; `generate`; `sleep`, `wake`.
    Anything that a method raises is raised on every rank of the component and, from `begin_refit` to `finish_refit`, forbids generating.
    """

    capabilities: Capabilities
    max_sequence_length: int

    def start(self) -> None:
        """Import the package and build the model with weights of any contents. Afterwards everything is awake."""

    def begin_refit(self, manifest: Manifest) -> None:
        """Prepare for exactly these tensors (Hugging Face names, full shapes). Acquire here what must not be held during training."""

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy these full, contiguous tensors into the engine's weights: whole fusion groups, names and shapes checked before. When it
        returns, the tensors may be overwritten. Must not wait for other ranks: if one fails, it is not called there again."""

    def finish_refit(self, version: int) -> None:
        """All buckets have arrived, on every rank: finish the load, forget cached prefixes; later results are of `version`."""

    def abort_refit(self) -> None:
        """The refit failed on some rank: leave what `begin_refit` entered. The weights stay mixed.

        Comes after any of the three others, whether that failed here (begin_refit too) or succeeded here (finish_refit too).
        """

    def read_back(self, name: str) -> Tensor | None:
        """The engine's weight of this Hugging Face name, full and in its dtype, for verification after `finish_refit`; None if it
        cannot be recovered from the engine's form (quantized, split over ranks)."""

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release the named device memory, as far as the engine can."""

    def wake(self, memory: frozenset[Memory]) -> None:
        """Take it again. Weights may hold anything until the next refit, which always follows before something is generated."""

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Take requests as room is free and yield finished ones as they end, in any order, until `work` has none left.

        Every rank of the replica consumes the iterator; results need be right on its first rank only. Every result's `weight_version` is
        the one of the last `finish_refit`.
        """

    def shutdown(self) -> None:
        """End the package's threads and give everything back; may be called at any time, and twice."""
