"""From the settings of an environment to whom the policy talks to."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.data.tokenizer import Tokenizer
from aligner.environments.config import EnvironmentConfig
from aligner.environments.environment import Environment
from aligner.environments.exchange import Converting, EnvironmentFollowUp
from aligner.environments.observing import observation_tokens, surroundings
from aligner.errors import ConfigError
from aligner.rewards.load import load_reward_function, raised
from aligner.types import Prompt


def build_environment(config: EnvironmentConfig) -> Environment:
    """What `config.path` returns for `config.arguments`. Raises ConfigError."""
    made = load_reward_function(config.path, "environment")
    try:
        environment = made(**config.arguments)
    except (Exception, SystemExit) as error:  # whatever user code raises
        given = f"environment.path={config.path}: cannot be made from {dict(config.arguments)}"
        raise ConfigError(f"{given}: {raised(error)}") from error
    if not isinstance(environment, Environment):
        raise ConfigError(f"environment.path={config.path}: gave a {type(environment).__name__} without reset(prompt) or step(state, turn)")
    return environment


def environment_follow_up(config: EnvironmentConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> EnvironmentFollowUp:
    """The environment of a run, with its observations in the form that the run's `prompts` are in. Raises ConfigError."""
    around = surroundings(config, tokenizer, prompts)

    def observe(text: str, last: int) -> tuple[int, ...]:
        return around.around(observation_tokens(tokenizer, text), last)

    return EnvironmentFollowUp(
        build_environment(config),
        Converting(decode=tokenizer.decode, observe=observe),
        max_turns=config.max_turns,
        timeout_seconds=config.timeout_seconds,
        num_workers=config.num_workers,
        on_error=config.on_error,
        name=config.path,
    )
