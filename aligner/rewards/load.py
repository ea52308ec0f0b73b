"""From the name of a reward function to the function."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from aligner.errors import AlignerError, ConfigError, UserCodeError
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.forms import Factory, RewardFunction
from aligner.settings.user_code import calling

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MODULE = "reward_function_"  # prefix of the names of modules loaded from files
FORMS = "package.module:name, package.module.name or path/to/file.py:name"


def load_reward_function(spec: str, what: str = "reward function") -> Callable:
    """Import what `spec` names (see `FORMS`; relative paths start at the working directory); `what` describes it in messages.

    Raises ConfigError if the form is wrong, the module or file cannot be imported, or the name is missing or not callable.
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
    """The function that `config` names, or what the factory it names returns for `config.arguments`. Raises ConfigError.

    `what` describes it in messages.
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
    """An exception of user code as readable text, with the user's own innermost line."""
    own = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((_PACKAGE, "<", *_INSTALLED))]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    if isinstance(error, SystemExit):
        return f"SystemExit: it ended the program (sys.exit({error.code!r}){place})"
    return f"{type(error).__name__}: {error}" + (f" ({place.strip()}, in {own[-1].name})" if own else "")


def position(thread: threading.Thread | None) -> tuple[str, list[traceback.FrameSummary]]:
    """File and line of a running thread's innermost frame, in words, and its stack."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    if frame is None:
        return "about to return", []
    stack = traceback.extract_stack(frame)
    return f"at {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].name})", stack


def may_pass(error: BaseException) -> bool:
    """Whether an exception of user code may be temporary: a connection's, or a library's own class, but not a programming error."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    gone = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    if any(isinstance(one, (OSError, EOFError, MemoryError)) and not isinstance(one, gone) for one in causes):
        return True
    module = type(error).__module__
    return module != "builtins" and not module.startswith(_MODULE)


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function for the setting `setting` (`algorithm.loss=mine.py:f`). Its exceptions become errors that name both."""

    setting: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Raises UserCodeError, or AlignerError for what `may_pass`."""
        try:
            with calling(self.setting):
                return self.function(*arguments)
        except AlignerError:
            raise
        except (Exception, SystemExit) as error:
            raise (AlignerError if may_pass(error) else UserCodeError)(f"{self.setting} raised {raised(error)}") from error


def _import_module(name: str, named: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code may raise anything while it is imported
        raise ConfigError(f"{named}: cannot import {name!r}: {raised(error)}") from error


class _Source(SourceFileLoader):
    """Compiles a file as it is: what Python keeps in the user's folder may be of a file of the same second and size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(location: str, named: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{named}: no such file: {path}")
    # Files of the same name in two folders are two modules; two functions of one file share a module and what it caches.
    name = f"{_MODULE}{path.stem}_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
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
