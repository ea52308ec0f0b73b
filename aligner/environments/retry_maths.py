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


class RetryMaths:
    """Each turn is an attempt: right if its last number is the prompt's answer. The first right one ends the episode with a reward of
    `discount` to the power of the attempts before it; after `attempts` wrong ones it ends with 0.

    `environment.max_turns` must not be smaller than `attempts`.
    """

    def __init__(
        self,
        *,
        attempts: int = 3,
        discount: float = 0.5,
        hint: str = "That is not right. Try again.",
        no_answer: str = "There is no number in this answer. Try again.",
        tolerance: float = 1e-6,
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"attempts={attempts}: must be at least 1")
        if not 0 <= discount <= 1:
            raise ConfigError(f"discount={discount}: must be from 0 to 1")
        self._attempts = attempts
        self._discount = discount
        self._hint = hint
        self._no_answer = no_answer
        self._tolerance = tolerance

    def reset(self, prompt: Prompt) -> _Attempts:
        """No attempt yet. Raises ValueError for a prompt whose answer is not a number."""
        return _Attempts(right_answer(prompt))

    def step(self, state: _Attempts, turn: Turn) -> Observation:
        """See the class. Counts `rollout/solved` and `rollout/solved_at_once`."""
        number = last_number(turn.text)
        if is_close(number, state.wanted, self._tolerance):
            counts = {"solved": 1.0, "solved_at_once": float(state.made == 0)}
            return Observation(done=True, reward=self._discount**state.made, counts=counts)
        state.made += 1
        if state.made == self._attempts:
            return Observation(done=True)
        return Observation(text=self._no_answer if number is None else self._hint)
