"""An environment in a file of one's own: the policy guesses the prompt's answer, a whole number, and is told `higher` or `lower`.

    python examples/nlp/train_grpo.py data.train=numbers.jsonl environment.max_turns=6 \
        environment.path=examples/nlp/environments/guess_number.py:GuessNumber +environment.arguments.bonus=0.5 ...

numbers.jsonl: {"prompt": "I think of a number from 1 to 20. Your guess, a number only:", "answer": "13"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aligner.environments.environment import Observation, Turn
from aligner.types import Prompt


@dataclass
class Game:
    """One episode's state: whatever `step` needs."""

    number: int


class GuessNumber:
    """1 for the number, and `bonus` / turns for finding it early; else nothing. Counts `rollout/not_a_number`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def reset(self, prompt: Prompt) -> Game:
        return Game(number=int(prompt.answer or ""))  # what cannot be read ends the run and names the prompt

    def step(self, state: Game, turn: Turn) -> Observation:
        found = re.search(r"-?\d{1,6}", turn.text)
        if found is None:
            return Observation(text="That is no number.", counts={"not_a_number": 1.0})
        guess = int(found[0])
        if guess == state.number:
            return Observation(done=True, reward=1.0 + self.bonus / turn.number)
        return Observation(text="higher" if guess < state.number else "lower")
