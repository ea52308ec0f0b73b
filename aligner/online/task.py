"""The inputs of PPO and GRPO besides a policy: prompts, engine, judges, and validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from aligner.data.order import EpochSampler
from aligner.data.reading import Mixed
from aligner.models.training.guard import GuardConfig
from aligner.online.collect import Scorers
from aligner.online.config import ValidationConfig
from aligner.parallel.topology import Topology
from aligner.protocols import Critic, Reference, RewardModel, RolloutEngine
from aligner.reporting.formats import Column, Goal
from aligner.types import Prompt, Rollout, SampleRow

SAMPLED = (  # columns of every run that samples
    Column("length", "rollout/response_length", ".1f"),
    Column("gap", "rollout/logprob_gap", ".1e"),
    Column("speed", "rollout/tokens_per_second", "tokens/s"),
)
REWARDED = (
    Column("reward", "rollout/reward", ".3f", Goal.highest),
    Column("accuracy", "validation/accuracy", "percent", Goal.highest),
    *SAMPLED,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Held-out prompts and how the responses to them are sampled, judged and kept."""

    prompts: Sequence[Prompt] = ()
    sampling: Any = None  # a SamplingConfig; greedy
    scorer: RewardModel | None = None  # judges responses against the prompts' answers
    config: ValidationConfig = field(default_factory=ValidationConfig)
    keep_samples: Callable[[Sequence[SampleRow]], None] = lambda rows: None  # is given the first few of each validation, on every rank


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineTask:
    """The parts of an online run that every algorithm uses in the same way."""

    engine: RolloutEngine
    reference: Reference | None  # None where no KL is measured
    judges: Scorers  # without a critic
    validation: Validation
    topology: Topology
    train: Sequence[Prompt]
    order: EpochSampler
    decode: Callable[[Sequence[int]], str]
    seed: int
    max_response_length: int
    compares_logprobs: bool = True  # the engine's log-probs are at the sampling temperature, as the policy's are
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding."""
        return self.judges.pad_id

    def prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step (counted from 1)."""
        return [self.train[index] for index in self.order.indices(step - 1)]

    def shares(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The share of each source of the training prompts in these rollouts; empty with a single source."""
        return self.train.shares([rollout.prompt for rollout in rollouts]) if isinstance(self.train, Mixed) else {}

    def scorers(self, critic: Critic | None = None) -> Scorers:
        """The judges of this run's rollouts: its reward, and `critic` for values."""
        return replace(self.judges, critic=critic)

    def given_away(self) -> AbstractContextManager[None]:
        """In the block the servers may compute, and the actor only waits for them. Collective; `SharedDevice.given_away`."""
        return nullcontext() if self.judges.shared is None else self.judges.shared.given_away()
