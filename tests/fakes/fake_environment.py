"""An environment whose words are token numbers, for models without a tokenizer."""

from __future__ import annotations

from aligner.environments.environment import Observation, Turn
from aligner.environments.exchange import Converting, EnvironmentFollowUp
from aligner.types import Prompt


class Repeats:
    """Tells the policy its turn's first three tokens plus 10; an episode ends with the third turn. The reward is the turn's length."""

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, state: None, turn: Turn) -> Observation:
        heard = tuple(10 + token % 40 for token in turn.tokens[:3])
        return Observation(tokens=heard, done=turn.number == 3, reward=float(len(turn.tokens)), counts={"heard": float(len(heard))})


def repeats() -> EnvironmentFollowUp:
    """To talk with."""
    converting = Converting(decode=lambda tokens: " ".join(map(str, tokens)), observe=lambda text, last: ())
    return EnvironmentFollowUp(Repeats(), converting, max_turns=3, timeout_seconds=20.0)
