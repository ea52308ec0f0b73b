"""Forms of reward functions besides the plain `reward(prompts, responses, answers)`: said by a wrapper, never guessed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aligner.rewards.reasoning import split_reasoning
from aligner.types import Rollout

# reward(prompts, responses, answers) -> one number per response. May be `async def`.
TextFunction = Callable[[list[str], list[str], list[str | None]], list[float] | Awaitable[list[float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response: its texts (special tokens too, without ends), where its prompt came from (`file:line`), and the rollout."""

    prompt: str
    response: str
    answer: str | None
    source: str
    rollout: Rollout

    @property
    def reasoning(self) -> str:
        """What the model wrote before its answer, by the marks that published models use; empty if none (`aligner.rewards.reasoning`)."""
        return split_reasoning(self.response, self.prompt)[0]

    @property
    def answer_text(self) -> str:
        """The response without its reasoning; empty if the reasoning did not end."""
        return split_reasoning(self.response, self.prompt)[1]


@dataclass(frozen=True, slots=True)
class OnSamples:
    """A reward function that needs more than texts: `function(samples) -> one number per sample`. May be `async def`. A decorator."""

    function: Callable[[list[Sample]], list[float] | Awaitable[list[float]]]

    def __call__(self, samples: list[Sample]) -> list[float] | Awaitable[list[float]]:
        return self.function(samples)


@dataclass(frozen=True, slots=True)
class Factory:
    """Something that makes a reward function of the config's `arguments`, also if there are none. A decorator.

    A function without it is a factory if arguments are given, and a reward function if not.
    """

    make: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(*args, **kwargs)


RewardFunction = TextFunction | OnSamples
