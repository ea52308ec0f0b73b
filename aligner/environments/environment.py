"""The environment protocol: two methods, plain or `async def`."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from aligner.types import Prompt

IMAGE = "<image>"  # the place of an image in an observation that has some


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The policy's turn: its tokens (including the stop token) and their text (without end tokens)."""

    text: str
    tokens: tuple[int, ...]
    number: int  # in the episode, from 1
    is_cut: bool = False  # it did not stop: the episode's maximal length was reached
    is_last: bool = False  # the policy has no further turn, whatever is observed: this step's reward is final


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The environment's reply to the policy; none is sent if the episode is `done`. `reward` adds to the episode's.

    `images` are encoded files (PNG, JPEG ...), for a model that sees; they stand in the places of `<image>` in the text, or before it.
    `tokens`, if given, replace `text`; nothing is put around them. `counts` are summed over the episode and
    logged as `rollout/<name>`, a mean over episodes; names that an episode lacks count as 0.
    """

    text: str = ""
    done: bool = False
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None
    images: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        for name, number in {"reward": self.reward, **{f"counts[{name!r}]": count for name, count in self.counts.items()}}.items():
            if not isinstance(number, numbers.Real):
                raise TypeError(f"Observation.{name} is {number!r}, expected a number")
        if not math.isfinite(self.reward):
            raise ValueError(f"Observation.reward is {self.reward}, expected a finite number")
        if not isinstance(self.text, str):
            raise ValueError(f"Observation.text is a {type(self.text).__name__}, expected a str")
        if self.images and self.tokens is not None:
            raise ValueError("Observation has images and tokens, expected images with a text")
        if self.images and (places := self.text.count(IMAGE)) not in (0, len(self.images)):
            raise ValueError(f"Observation.text has {places} of {IMAGE!r} for {len(self.images)} images, expected one for each, or none")


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can contain (`"\\ud800"`) and no tokenizer accepts."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


@runtime_checkable
class Environment(Protocol):
    """One object per sampling process for the whole run; an episode's data belong in its state.

    Both methods may be `async def`. Threads call them for many episodes concurrently (never twice at once for one): shared data must
    be thread-safe. An exception ends the run or drops the episode (`environment.on_error`); neither scores it 0.
    """

    def reset(self, prompt: Prompt) -> Any:
        """The state of a new episode, before its first step. `prompt.text` and `prompt.answer` are the data set's."""

    def step(self, state: Any, turn: Turn) -> Any:
        """An `Observation`: what follows this turn. The state may be changed in place."""
