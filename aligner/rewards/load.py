"""From the name of a reward function to the function."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from aligner.errors import ConfigError
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.forms import Factory, RewardFunction
from aligner.user_code import calling

FORMS = "package.module:name, package.module.name or path/to/file.py:name"


def load_reward_function(spec: str, what: str = "reward function") -> Callable:
    """Import what `spec` names (see `FORMS`; a relative path counts from the working directory); `what` it is, in messages.

    Raises ConfigError if the form is wrong, the module or file cannot be imported, or the name is not there or not callable.
    """
    if ":" in spec:
        location, _, name = spec.rpartition(":")
    else:
        location, _, name = spec.rpartition(".")
    if not location or not name or spec.endswith(".py"):
        raise ConfigError(f"{what} {spec!r}: expected {FORMS}")
    named = f"{what} {spec!r}"
    with calling(f"the import of {named}"):
        module = _import_file(location, named) if location.endswith(".py") else _import_module(location, named)
    names = vars(module)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(f"{what} {spec!r}: {location} has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if not callable(names[name]):
        raise ConfigError(f"{what} {spec!r}: {name} is a {type(names[name]).__name__}, expected a function")
    return names[name]


def build_reward_function(config: RewardFunctionConfig, what: str = "reward function") -> RewardFunction:
    """The function that `config` names, or what the factory that it names returns for `config.arguments`; `what` it is, in messages.

    Raises ConfigError.
    """
    loaded = load_reward_function(config.path, what)
    if not config.arguments and not isinstance(loaded, Factory):
        return loaded
    try:
        with calling(f"{what} {config.path}"):
            made = loaded(**config.arguments)
    except (Exception, SystemExit) as error:
        given = f"{what} {config.path!r} cannot be made from arguments {dict(config.arguments)}"
        raise ConfigError(f"{given}: {raised(error)}") from error
    if not callable(made):
        raise ConfigError(f"{what} {config.path!r} returned a {type(made).__name__} for its arguments, expected a function")
    return made


def raised(error: BaseException) -> str:
    """The exception of user code, as readable text."""
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"it ended the program (sys.exit({error.code!r}) at {last.filename}:{last.lineno})"
    return f"{type(error).__name__}: {error}"


def _import_module(name: str, named: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever user code raises while it is imported
        raise ConfigError(f"{named}: cannot import {name!r}: {raised(error)}") from error


def _import_file(location: str, named: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{named}: there is no file {path}")
    # Files of one name in two folders are two modules; two functions of one file share it, with what it caches.
    name = f"reward_function_{path.stem}_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{named}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{named}: cannot import {path}: {raised(error)}") from error
    return module
