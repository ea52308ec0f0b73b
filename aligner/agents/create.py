"""Makes the agents that `environment.kind` names."""

from __future__ import annotations

import shutil

from aligner.agents import Agents
from aligner.agents.command import CommandAgents
from aligner.agents.verifiers import Verifiers
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.errors import ConfigError


def create_agents(config: EnvironmentConfig) -> Agents:
    """The programs that play the run's sessions. Raises ConfigError."""
    if config.chosen is EnvironmentKind.verifiers:
        return Verifiers(config)
    if shutil.which(config.command[0]) is None:
        raise ConfigError(f"{config.title}: there is no program {config.command[0]!r} on this machine")
    return CommandAgents(config.command, pass_environment=config.sessions.pass_environment)
