"""A recipe is a module of `aligner.algorithms`, or of another package, with a `RECIPE`. Launchers, `aligner plan`, the preflight and
the report hard-code no recipe: they look it up in `aligner.algorithms.registry` and read its traits from its config.

`resolve` reads a setting that names a built-in (`algorithm.advantage_estimator=rloo`) or a user's function
(`algorithm.advantage_estimator=my_file.py:opo`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from aligner.errors import ConfigError
from aligner.files import conf_directory
from aligner.reporting.formats import Column
from aligner.rewards.load import FORMS, UserFunction, load_reward_function
from aligner.run.settings import JobRun

Options = TypeVar("Options", bound=Enum)


def text_of(value: str) -> str:
    """The name of an enum member; any other text unchanged. For fields that accept either."""
    return value.value if isinstance(value, Enum) else value


def named(setting: str, value: str, options: type[Options]) -> Options | None:
    """The built-in that the value names; None for a user's function, which is not imported. Raises ConfigError for neither."""
    text = text_of(value)
    if ":" in text:
        return None
    if text not in [option.value for option in options]:
        raise ConfigError(f"{setting}={text}: allowed: {', '.join(option.value for option in options)}, or {FORMS.rpartition(' or ')[2]}")
    return options(text)


def resolve(setting: str, value: str, options: type[Options], parameters: Sequence[str]) -> Options | Callable[..., Any]:
    """As `named`, with the user's function imported and its exceptions named. Raises ConfigError if these parameters do not fit."""
    found = named(setting, value, options)
    if found is not None:
        return found
    function = load_reward_function(value, setting)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        name = value.rpartition(":")[2]
        raise ConfigError(f"{setting}={value}: {error}; expected {name}({', '.join(parameters)})") from error
    return UserFunction(f"{setting}={value}", function)


C = TypeVar("C", bound=JobRun)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Generic[C]):
    """Users type `name`, also its config's. `build(job)` builds the algorithm, or does a writing job's work; `config`: its settings."""

    name: str
    config: type[C]
    build: Callable[[Any], Any]
    columns: Sequence[Column]  # that the progress view and the final summary show
    component: str = ""  # what its files in the run directory are called by; "": its name
    conf: Path | None = None  # folder of its configs and presets; None: conf/<name>
    presets_of: Sequence[str] = ()  # other recipes, whose presets it takes too

    def folders(self) -> list[Path]:
        """Folders of its configs (the first) and presets."""
        others = [conf_directory() / name for name in self.presets_of]
        return [self.conf or conf_directory() / self.name, *others, conf_directory()]

    def __post_init__(self) -> None:
        if missing := sorted(getattr(self.config, "__abstractmethods__", ())):
            raise TypeError(
                f"recipe {self.name}: {self.config.__name__} has no method {', '.join(missing)} (see aligner.run.settings.JobRun)"
            )
