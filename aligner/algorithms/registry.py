"""All recipes: modules of this package with a `RECIPE`, and entry points `aligner.recipes` of other packages. Nothing else lists them."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aligner import algorithms
from aligner.errors import ConfigError
from aligner.files import conf_directory, configs
from aligner.run.recipe import Recipe
from aligner.settings.compose import compose, schema_of, search_path
from aligner.settings.explain import built_on, find_file

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
            raise ConfigError(f"{where} is a {type(recipe).__name__}, expected an aligner.run.recipe.Recipe")
        if recipe.name in found:
            raise ConfigError(f"{where}: there is a recipe {recipe.name} already")
        found[recipe.name] = recipe
    return MappingProxyType(found)


def built_in(name: str) -> Recipe[Any] | None:
    """The recipe of this package with this name, which is also its module's; the other recipes are not imported."""
    if name not in [one.name for one in pkgutil.iter_modules(algorithms.__path__)]:
        return None
    recipe = getattr(importlib.import_module(f"{algorithms.__name__}.{name}"), "RECIPE", None)
    return recipe if isinstance(recipe, Recipe) else None


def recipe_of(name: str, overrides: Sequence[str] = ()) -> Recipe[Any]:
    """The recipe that a config belongs to: `ppo_70b` in conf/ppo/ to `ppo`; one in a `--config-dir` to that of the config that its
    `defaults` begin with. Raises ConfigError if there is no such config, or no recipe that it builds on.
    """
    base, seen = name, []
    while base and base not in seen:
        own = built_in(base) or next(filter(None, (built_in(file.parent.name) for file in conf_directory().glob(f"*/{base}.yaml"))), None)
        for recipe in [own] if own else recipes().values():
            if base == recipe.name or (recipe.folders()[0] / f"{base}.yaml").is_file():
                return recipe
        seen.append(base)
        file = find_file(base, _users(overrides))
        base = built_on(file) if file else base
    if find_file(name, _users(overrides)):
        raise ConfigError(f"config {name!r} builds on no recipe: begin its `defaults` with the name of one ({', '.join(recipes())})")
    near = difflib.get_close_matches(name, known := sorted({*configs(), *recipes()}), n=1)
    raise ConfigError(f"there is no config {name!r}: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"))


def recipe_recorded(text: str) -> Recipe[Any]:
    """The recipe of a config that `to_yaml` wrote; of several the one that defines the settings class. Raises ConfigError for none."""
    schema = schema_of([recipe.config for recipe in recipes().values()], text)
    having = [recipe for recipe in recipes().values() if recipe.config is schema]
    return min(having, key=lambda recipe: not schema.__module__.endswith(f".{recipe.name}"))


def config_file(name: str, overrides: Sequence[str] = ()) -> Path | None:
    """Where the config lies; None for a recipe that has only the defaults of its schema. Raises ConfigError as `recipe_of` does."""
    return find_file(name, [recipe_of(name, overrides).folders()[0], *_users(overrides)])


def _users(overrides: Sequence[str]) -> list[Path]:
    return [place for place in search_path(overrides)[0] if isinstance(place, Path)]


def composed(name: str, overrides: Sequence[str] = ()) -> Any:
    """The config `name` of whatever recipe with `overrides`. Raises ConfigError as `aligner.settings.compose` and `recipe_of` do."""
    recipe = recipe_of(name, overrides)
    return compose(recipe.config, name, overrides, recipe.folders())
