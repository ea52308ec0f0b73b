"""From the settings of an environment to the object, for environments of this process, and the prompts that some of them bring along."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.environments.environment import Environment
from aligner.errors import ConfigError
from aligner.rewards.load import load_reward_function, raised

_FOLDER = "aligner.environments.adapters"
_ADAPTERS = {  # a class that is made of the settings, and the package that it needs
    EnvironmentKind.gymnasium: (f"{_FOLDER}.gymnasium:Gymnasium", "gymnasium"),
    EnvironmentKind.reasoning_gym: (f"{_FOLDER}.reasoning_gym:ReasoningGym", "reasoning_gym"),
    EnvironmentKind.openenv: (f"{_FOLDER}.openenv:OpenEnv", "aiohttp"),
}
_INSTALL = {"gymnasium": "'aligner[environments]'", "reasoning_gym": "reasoning-gym"}


@runtime_checkable
class HasTasks(Protocol):
    """An environment whose episodes begin with prompts of its own."""

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """`count` records of prompts, the episodes of the seeds from `seed` on."""


@runtime_checkable
class HasTools(Protocol):
    """An environment whose tools a chat template can offer."""

    def tools(self) -> list[dict[str, Any]]:
        """Their schemas, as `{type: function, function: {name, description, parameters}}`."""


def build_environment(config: EnvironmentConfig) -> Environment:
    """What `config` names: `config.path` is called with `config.arguments`. Raises ConfigError."""
    place, package = _ADAPTERS.get(config.chosen, (config.path, ""))
    if package and importlib.util.find_spec(package) is None:
        needs = f"environment.kind={config.chosen.value}: needs {package.replace('_', '-')}, which is not installed"
        raise ConfigError(f"{needs}: pip install {_INSTALL.get(package, package)}")
    made = load_reward_function(place, "environment")
    try:
        environment = made(config) if package else made(**config.arguments)
    except (Exception, SystemExit) as error:  # user code, or a package's, may raise anything
        if package and isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{config.title}: cannot be made from {dict(config.arguments)}: {raised(error)}") from error
    if not isinstance(environment, Environment):
        raise ConfigError(f"{config.title}: returned a {type(environment).__name__} without reset(prompt) or step(state, turn)")
    return environment
