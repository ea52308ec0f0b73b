"""An environment that rejects wrong answers and lets the policy try again."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.environments.calculator import is_close, last_number, right_answer
from aligner.environments.environment import Observation, Turn
from aligner.errors import ConfigError
from aligner.types import Prompt


@dataclass(slots=True)
class _Attempts:
    wanted: float
    made: int = 0


@dataclass(kw_only=True)
class RetryMaths:
    """Each turn is an attempt: right if its last number is the prompt's answer. The first right one ends the episode with a reward of
    `discount` to the power of the attempts before it; after `attempts` wrong ones it ends with 0.

    `environment.max_turns` must not be smaller than `attempts`.
    """

    attempts: int = 3
    discount: float = 0.5
    hint: str = "That is not right. Try again."
    no_answer: str = "There is no number in this answer. Try again."
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts}: must be at least 1")
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount={self.discount}: must be from 0 to 1")

    def reset(self, prompt: Prompt) -> _Attempts:
        """No attempt yet. Raises ValueError for a prompt whose answer is not a number."""
        return _Attempts(right_answer(prompt))

    def step(self, state: _Attempts, turn: Turn) -> Observation:
        """See the class. Counts `rollout/solved` and `rollout/solved_at_once`."""
        number = last_number(turn.text)
        if is_close(number, state.wanted, self.tolerance):
            counts = {"solved": 1.0, "solved_at_once": float(state.made == 0)}
            return Observation(done=True, reward=self.discount**state.made, counts=counts)
        state.made += 1
        if state.made == self.attempts:
            return Observation(done=True)
        return Observation(text=self.no_answer if number is None else self.hint)
