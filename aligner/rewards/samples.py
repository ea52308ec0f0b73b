"""Rollouts as the texts that reward functions are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aligner.rewards.forms import Sample
from aligner.types import Rollout

EXCERPT_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The samples of one call of a reward function."""

    samples: tuple[Sample, ...]
    version: int  # of the policy that sampled them

    def __len__(self) -> int:
        return len(self.samples)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> Samples:
        """Their texts, without special tokens if `decode` leaves them out."""
        samples = tuple(
            Sample(
                prompt=rollout.prompt.text or decode(rollout.prompt.tokens),
                response=decode(rollout.response),
                answer=rollout.prompt.answer,
                source=rollout.prompt.source,
                rollout=rollout,
            )
            for rollout in rollouts
        )
        return cls(samples=samples, version=max((rollout.policy_version for rollout in rollouts), default=0))

    def at(self, i: int) -> Samples:
        """Sample i alone."""
        return Samples(samples=self.samples[i : i + 1], version=self.version)

    def texts(self) -> tuple[list[str], list[str], list[str | None]]:
        """Prompts, responses and answers."""
        return (
            [sample.prompt for sample in self.samples],
            [sample.response for sample in self.samples],
            [sample.answer for sample in self.samples],
        )

    def describe(self, i: int) -> str:
        """Where sample i came from and how its response begins."""
        response = self.samples[i].response
        excerpt = response[:EXCERPT_CHARACTERS] + ("..." if len(response) > EXCERPT_CHARACTERS else "")
        return f"sample {i} of {len(self)} (prompt {self.samples[i].source}, response {excerpt!r})"
