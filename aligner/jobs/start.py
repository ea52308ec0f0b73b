"""Starts what a config asks for: the job of its recipe's kind, and programs whose command line is a recipe's settings.

Jobs are imported when they start: Megatron-Core comes with them, and settings are refused before it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from aligner.algorithms.registry import built_in, recipe_of, recipes
from aligner.cluster.outcomes import ExitCode
from aligner.errors import ConfigError
from aligner.run.program import entrypoint
from aligner.run.recipe import Recipe
from aligner.run.settings import JobRun, Kind
from aligner.settings.command_line import read

JOBS: Mapping[Kind, tuple[str, str]] = {
    Kind.trains: ("aligner.jobs.trains", "train"),
    Kind.samples: ("aligner.jobs.samples", "train"),
    Kind.writes: ("aligner.jobs.writes", "write"),
}
SERVERS: Mapping[str, tuple[str, str]] = {  # by the section of the settings that describes the server
    "critic": ("aligner.jobs.serves", "serve_critic"),
    "reward": ("aligner.jobs.serves", "serve_reward_model"),
}


def _function(place: tuple[str, str]) -> Callable[..., Any]:
    module, name = place
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def start(recipe: Recipe[Any], config: JobRun) -> int:
    """Run the recipe on this process, which is one rank. Returns the exit code: 0, or 75 if stopped before the last step."""
    return _function(JOBS[config.kind])(recipe, config)  # type: ignore[no-any-return]


def program(name: str) -> Callable[..., None]:
    """The program of a recipe: reads the command line and runs it. See `aligner.run.program.entrypoint`."""
    recipe = built_in(name) or recipes()[name]
    return entrypoint(recipe.config, name, recipe.folders(), recipe.columns)(lambda config: start(recipe, config))


def server_program(section: str) -> Callable[..., None]:
    """The program of the server that this section describes. `recipe=NAME`, or the config, selects the recipe (default: ppo)."""

    def main(argv: Sequence[str] | None = None, program: str = "") -> None:
        try:
            command = read(sys.argv[1:] if argv is None else argv)
            names = [one.removeprefix("recipe=") for one in command.overrides if one.startswith("recipe=")]
            command.overrides = [one for one in command.overrides if not one.startswith("recipe=")]
            recipe = recipe_of((names or [command.config or "ppo"])[-1], command.overrides)
            if section not in (one.name for one in fields(recipe.config)):
                able = [one.name for one in recipes().values() if section in (field.name for field in fields(one.config))]
                raise ConfigError(f"recipe={recipe.name}: has no {section} to serve; allowed: {', '.join(able)}")
            if command.asks == "--multirun":
                raise ConfigError("--multirun: a server is a part of a run; sweep with the program that trains")
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(ExitCode.refused)
        entrypoint(recipe.config, recipe.name, recipe.folders())(lambda config: _function(SERVERS[section])(config))(command, program)

    return main
