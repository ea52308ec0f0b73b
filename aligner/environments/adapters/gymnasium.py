"""Environments of Gymnasium (https://gymnasium.farama.org): actions and observations that are texts, or written as texts.

- Actions: a `Text` space gets the turn's text without spaces around it; a `Discrete` one the action named last in it, by
  `environment.actions` or its number. A turn without a legal action is answered with the legal ones, and counted (`invalid_actions`).
- Observations: a text as it is; with `environment.arguments.render_mode=ansi` what the environment draws; else as Python writes it.
- An episode's seed is its prompt's field `seed`, else the prompt's place in the data; `aligner data tasks` writes prompts with both, the
  first observation as text: the policy sees no other first one.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from aligner.environments.config import EnvironmentConfig
from aligner.environments.environment import Observation, Turn
from aligner.errors import ConfigError
from aligner.types import Prompt


class Gymnasium:
    """`aligner.environments.environment.Environment`: one of Gymnasium's per episode."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        trial = self._made()
        space, actions = trial.action_space, list(config.actions)
        trial.close()
        if isinstance(space, Text):
            if actions:
                raise ConfigError(f"environment.actions={actions}: the actions of {config.name} are texts; allowed: none")
        elif not isinstance(space, Discrete):
            raise ConfigError(f"{config.title}: its actions are {space}; allowed: a Text or a Discrete space (wrap it in one)")
        elif actions and not (len(actions) == space.n == len({name.lower() for name in actions}) and all(actions)):
            raise ConfigError(f"environment.actions={actions}: {config.name} has {space.n} actions; allowed: as many different names")
        else:
            actions = actions or [str(space.start + i) for i in range(space.n)]
        self._start = int(getattr(space, "start", 0))
        self._actions = {name.lower(): number for number, name in enumerate(actions)}
        longest_first = sorted(self._actions, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_whole, longest_first)), re.IGNORECASE)
        self._legal = f"one of {', '.join(actions)}" if actions else f"a text in {space}"

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """The first observations, with the names of the actions below."""
        for one in range(seed, seed + count):
            environment = self._made()
            observation, _ = environment.reset(seed=one)
            yield {
                "prompt": "\n".join([self._shown(environment, observation), *([f"Action: {self._legal}."] * bool(self._actions))]),
                "seed": one,
            }
            environment.close()

    def reset(self, prompt: Prompt) -> gymnasium.Env[Any, Any]:
        environment = self._made()
        environment.reset(seed=int(prompt.columns.get("seed", prompt.id)))
        return environment

    def step(self, state: gymnasium.Env[Any, Any], turn: Turn) -> Observation:
        """One action. Counts `invalid_actions`, and `env_truncated` where the environment itself cuts the episode."""
        action = self._action(state, turn.text)
        if action is None:
            return Observation(text=f"Not an action: write {self._legal}.", counts={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = state.step(action)
        done = bool(terminated or truncated)
        text = "" if done else self._shown(state, observation)
        if done or turn.is_last:
            state.close()
        return Observation(text=text, done=done, reward=float(reward), counts={"env_truncated": float(truncated)})

    def _made(self) -> gymnasium.Env[Any, Any]:
        """A registered environment, or an object of a class `module:Class`."""
        module, _, name = self._config.name.rpartition(":")
        if module and name not in gymnasium.registry:
            found = getattr(importlib.import_module(module), name, None)
            if inspect.isclass(found):
                made: gymnasium.Env[Any, Any] = found(**self._config.arguments)
                return made
        registered: Any = gymnasium.make(self._config.name, **self._config.arguments)
        return registered

    def _action(self, environment: gymnasium.Env[Any, Any], text: str) -> Any:
        """The action that a turn names; None if it names none."""
        if not self._actions:
            return text.strip() if environment.action_space.contains(text.strip()) else None
        named = self._pattern.findall(text)
        return self._start + self._actions[named[-1].lower()] if named else None

    def _shown(self, environment: gymnasium.Env[Any, Any], observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        return str(environment.render()) if environment.render_mode == "ansi" else str(_plain(observation))


def _whole(name: str) -> str:
    """A pattern of the name, not inside a word."""
    before, behind = (r"(?<!\w)" if name[0].isalnum() else ""), (r"(?!\w)" if name[-1].isalnum() else "")
    return f"{before}{re.escape(name)}{behind}"


def _plain(value: Any) -> Any:
    """Without NumPy's types, which write themselves differently in its versions."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value
