"""Data sets of reasoning-gym (https://github.com/open-thought/reasoning-gym): its questions, and its scores as rewards, in this process.

`aligner data tasks` writes the questions; the field `index` of a prompt says which entry it is. `environment.arguments` are those of
`reasoning_gym.create_dataset` (`size` is at least what the prompts need), and they must be the same as when the prompts were written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from aligner.environments.config import EnvironmentConfig
from aligner.environments.environment import Observation, Turn
from aligner.errors import ConfigError
from aligner.rewards.reasoning import split_reasoning
from aligner.types import Prompt

SEED = 0  # of a data set whose arguments give none: by default each process would draw its own


class ReasoningGym:
    """`aligner.environments.environment.Environment`: a turn is the answer, in `<answer>` or alone, behind its reasoning."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._data = self._of_size(int(config.arguments.get("size", 0)) or 500)

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """The entries from number `seed` on."""
        data = self._of_size(seed + count)
        for index in range(seed, seed + count):
            entry = data[index]
            yield {"prompt": entry["question"], "answer": str(entry["answer"]), "index": index}

    def reset(self, prompt: Prompt) -> tuple[dict[str, Any], str]:
        """The entry, and the question. Raises ValueError if the prompt's question is another one."""
        index = prompt.columns.get("index")
        if not isinstance(index, int):
            raise ValueError(f"the record has no field 'index' (it is {index!r}); write prompts with `aligner data tasks`")
        if index >= len(self._data):
            self._data = self._of_size(index + 1)
        entry = self._data[index]
        asked = prompt.columns.get("prompt", prompt.text)
        if isinstance(asked, str) and asked != entry["question"]:
            raise ValueError(
                f"the question of entry {index} is {entry['question'][:80]!r}, the prompt's {asked[:80]!r}: "
                f"environment.arguments={dict(self._config.arguments)} or the package's version differ from when the prompts were written"
            )
        return entry, prompt.text

    def step(self, state: tuple[dict[str, Any], str], turn: Turn) -> Observation:
        """The data set's own score of the answer."""
        entry, asked = state
        response = split_reasoning(turn.text, asked)[1]
        answer = extract_answer(response) or response.strip()
        return Observation(done=True, reward=float(self._data.score_answer(answer=answer, entry=entry)))

    def _of_size(self, size: int) -> Any:
        try:
            return reasoning_gym.create_dataset(self._config.name, **{"seed": SEED, **self._config.arguments, "size": size})
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"environment.name={self._config.name} with arguments={dict(self._config.arguments)}: reasoning-gym refuses it: {error}"
            ) from error
