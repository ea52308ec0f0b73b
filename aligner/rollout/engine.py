"""What a rollout engine is, and what goes into and comes out of one.

An engine samples from weights of its own or from the policy's in place. The order of a step's phases is fixed: wake the weights, refit,
wake the key-value cache, generate, sleep. `aligner.rollout.lifecycle` holds every engine to it; a refit that fails leaves mixed weights,
so nothing is generated after it until another one succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from aligner.types import FinishReason, LogprobKind, SamplingConfig


class Memory(str, Enum):
    """What an engine can give back between two generations."""

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
    """What an engine can do, for those who configure a run."""

    name: str
    max_tp: int | None  # ranks that can share one replica; None: as many as the model's sizes allow
    per_request_seeds: bool  # whether a sample depends on its prompt and seed alone
    logprobs: LogprobKind
    weights: WeightForm
    atomic_groups: bool  # whether tensors that the engine fuses (q, k, v; gate, up; a layer's experts) must arrive in one bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class GenRequest:
    """One response that is wanted; `index` is the caller's name for it."""

    index: int
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenResult:
    """One finished response. `logprobs` are of the sampled tokens, of the kind that is said; `raw_logprobs` at temperature 1 where the
    engine gives both."""

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    kind: LogprobKind
    finish_reason: FinishReason
    weight_version: int
    raw_logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("logprobs", "raw_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"GenResult.{name} has {len(values)} entries for {len(self.tokens)} tokens")


class Work(Protocol):
    """Where an engine's requests come from: a list, or a queue that several replicas share."""

    def take(self, room: int) -> Sequence[GenRequest]:
        """Up to `room` (at least 1) more requests, those of one prompt next to each other; none where nothing is left.

        Every rank of a replica calls it at the same point with the same `room` and gets the same requests.
        """


class ListedWork:
    """Requests that were known from the start, for one replica."""

    def __init__(self, requests: Sequence[GenRequest]) -> None:
        self._requests = list(requests)

    def take(self, room: int) -> Sequence[GenRequest]:
        taken, self._requests = self._requests[:room], self._requests[room:]
        return taken


class Engine(Protocol):
    """One replica's engine on one rank; every rank of the replica calls every method."""

    capabilities: Capabilities

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Take requests as room is free and yield finished ones as they end, in any order, until `work` has none left."""
