"""What an environment is: two methods, plain or `async def`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from aligner.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the policy wrote before it stopped: its tokens (the stop token among them) and their text without special tokens."""

    text: str
    tokens: tuple[int, ...]
    number: int  # in the episode, from 1
    is_cut: bool = False  # it did not stop: the episode's length was used up
    is_last: bool = False  # whatever is observed, the policy has no further turn: this step's reward is the last word


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the policy is told. Where the episode is `done` it is told nothing more. `reward` is added to the episode's.

    `tokens` stand in for `text` where the environment has its own; nothing is put around them. `counts` are added up over the episode and
    logged as `rollout/<name>`, a mean over episodes; every episode counts 0 of what it does not name.
    """

    text: str = ""
    done: bool = False
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"Observation.reward is {self.reward}, expected a finite number")
        if not isinstance(self.text, str):
            raise ValueError(f"Observation.text is a {type(self.text).__name__}, expected a str")


@runtime_checkable
class Environment(Protocol):
    """One object for a whole run in each process that samples; what belongs to an episode is in its state.

    Both methods may be `async def`, and are called for many episodes at the same time (never twice at once for one), in threads: what they
    share must be made for that. What they raise ends the run, or (`environment.on_error`) leaves the episode out; neither gives it a 0.
    """

    def reset(self, prompt: Prompt) -> Any:
        """The state of a new episode, before its first step. `prompt.text` and `prompt.answer` are the data set's."""

    def step(self, state: Any, turn: Turn) -> Any:
        """An `Observation`: what follows this turn. The state may be changed in place."""
