"""Settings that name a variant of ours (`algorithm.loss=sigmoid`) or a function of the user's (`algorithm.loss=my_file.py:hinge`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from aligner.errors import ConfigError
from aligner.rewards.load import FORMS, load_reward_function

Options = TypeVar("Options", bound=Enum)


def text_of(value: str) -> str:
    """A member of an enum as the text that names it; any other text as it is. For fields that may be given either."""
    return value.value if isinstance(value, Enum) else value


def named(setting: str, value: str, options: type[Options]) -> Options | None:
    """Which of ours the value names; None for a function of the user's, which is not imported. Raises ConfigError for neither."""
    text = text_of(value)
    if ":" in text:
        return None
    if text not in [option.value for option in options]:
        raise ConfigError(f"{setting}={text}: allowed: {', '.join(option.value for option in options)}, or {FORMS.rpartition(' or ')[2]}")
    return options(text)


def resolve(setting: str, value: str, options: type[Options], parameters: Sequence[str]) -> Options | Callable[..., Any]:
    """As `named`, and imports the user's function. Raises ConfigError if it cannot be called with these parameters by position."""
    found = named(setting, value, options)
    if found is not None:
        return found
    function = load_reward_function(value, setting)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        name = value.rpartition(":")[2]
        raise ConfigError(f"{setting}={value}: {error}; expected {name}({', '.join(parameters)})") from error
    return function
