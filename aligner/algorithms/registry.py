"""The recipes that there are: every module of this package with a `RECIPE`, and those that other packages name as entry points of the group
`aligner.recipes`. Nothing else lists them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from aligner import algorithms
from aligner.cluster.exit_codes import ExitCode
from aligner.config import entrypoint
from aligner.errors import ConfigError
from aligner.loop.config import JobRun
from aligner.loop.recipe import Recipe
from aligner.presets import belongs_to

GROUP = "aligner.recipes"


@functools.cache
def recipes() -> Mapping[str, Recipe[Any]]:
    """All recipes by name. Raises ConfigError for one of another package that cannot be imported, or whose name is taken."""
    modules = (importlib.import_module(f"{algorithms.__name__}.{one.name}") for one in pkgutil.iter_modules(algorithms.__path__))
    found: dict[str, Recipe[Any]] = {}
    for module in modules:
        if isinstance(recipe := getattr(module, "RECIPE", None), Recipe):
            found[recipe.name] = recipe
    for entry in entry_points(group=GROUP):
        where = f"entry point {GROUP}: {entry.name} = {entry.value}"
        try:
            recipe = entry.load()
        except Exception as error:
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(recipe, Recipe):
            raise ConfigError(f"{where} is a {type(recipe).__name__}, expected an aligner.loop.recipe.Recipe")
        if recipe.name in found:
            raise ConfigError(f"{where}: there is a recipe {recipe.name} already")
        found[recipe.name] = recipe
    return MappingProxyType(found)


def recipe_of(name: str) -> Recipe[Any]:
    """The recipe that a file of conf/ belongs to: `ppo_70b` to `ppo`. Raises ConfigError for a name of none."""
    fitting = [recipe for recipe in recipes().values() if belongs_to(name, recipe.name)]
    if not fitting:
        raise ConfigError(f"config {name!r}: its name must begin with one of {', '.join(recipes())}")
    return max(fitting, key=lambda recipe: len(recipe.name))


def server_program(section: str, serve: Callable[[JobRun], None]) -> Callable[[], None]:
    """The program of a server: `recipe=NAME` (default: ppo) among its arguments, or a `config=` file's name, says whose settings it has.

    `section` is the one of a recipe's settings that describes the server.
    """

    def main() -> None:
        names, others = _split("recipe=", sys.argv[1:])
        files, _ = _split("config=", others)
        try:
            recipe = recipe_of(([*(recipe_of(file).name for file in files), *names] or ["ppo"])[-1])
            if section not in (one.name for one in fields(recipe.config)):
                able = [one.name for one in recipes().values() if section in (field.name for field in fields(one.config))]
                raise ConfigError(f"recipe={recipe.name}: has no {section} to serve; allowed: {', '.join(able)}")
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(ExitCode.refused)
        entrypoint(recipe.config, recipe.name)(serve)(others)

    return main


def _split(prefix: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what stands behind the prefix in those that have it, the others)."""
    found = [argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)]
    return found, [argument for argument in arguments if not argument.startswith(prefix)]


def program(name: str) -> Callable[..., None]:
    """The program of a recipe: reads the command line and runs it. See `aligner.config.entrypoint`."""
    recipe = recipes()[name]
    return entrypoint(recipe.config, name)(recipe.run)
