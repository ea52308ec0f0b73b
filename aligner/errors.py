"""The exceptions that this package raises for things a user can fix.

A bad value raises `ConfigError`, a `ValueError` that names field, value and what is allowed; run-time failures are `AlignerError`s too.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

_STORAGE = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the quota of this user or project is used up",
    errno.EIO: "the device, or the server of a shared file system, reported an input/output error",
    errno.ESTALE: "the file is gone on the shared file system's server (it was removed there, or the server restarted)",
    errno.EROFS: "the file system is mounted read-only (shared file systems do this after an error)",
    errno.EACCES: "this user may not write there",
    errno.EFBIG: "the file would be larger than allowed (ulimit -f)",
    errno.ETIMEDOUT: "the shared file system's server did not answer",
}


class AlignerError(Exception):
    """Root of the tree: catch this to catch every run-time error of the package."""


class ConfigError(AlignerError, ValueError):
    """A setting that cannot work: names the field, the value and what is allowed."""


class UserCodeError(ConfigError):
    """A user's function or class raised, or returned a wrong value: names its setting as typed, and where it raised."""


class DataError(AlignerError, ValueError):
    """A bad record: names file and line."""


class LaunchError(AlignerError):
    """The ranks of a component could not be started or do not agree with each other."""


class RunHalted(AlignerError):
    """The run ended itself for good: a restart from the last checkpoint would not help. Names the reason and what to look at."""


class RollBack(AlignerError):
    """Training step `step` (None: the current one) produced numbers that are not finite: the run must resume without it."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(AlignerError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class ModelFilesError(CheckpointError, ConfigError):
    """The files of the model that a setting names are damaged, incomplete or do not match their config.json."""


class WrongContents(CheckpointError):
    """The files of a checkpoint are whole, but their tensors differ from the saved ones."""


class EngineError(AlignerError):
    """A rollout engine cannot generate what was requested."""


class ServerError(AlignerError):
    """A critic or reward server could not fulfil a request; root of the server errors."""


class TritonDied(ServerError):
    """tritonserver ended while it was starting, before every endpoint answered."""


class ServerUnreachable(ServerError):
    """Nothing answers at the address: names the server, its place and since when."""


class ServerTimeout(ServerError):
    """The server took longer than the configured deadline."""


class RequestRejected(ServerError):
    """The server answered with an error: carries its message."""


def is_storage_error(error: OSError) -> bool:
    """Whether a file system is in trouble, or refuses: no change of the program helps."""
    return error.errno in _STORAGE


def describe_os_error(error: OSError, path: os.PathLike[str] | str) -> str:
    """What failed, in one line: what the error number means, the file, the number's name. `path` stands in where the error names none."""
    where = error.filename or os.fspath(path)
    if error.errno is None:
        return f"{where}: {error}"
    said = os.strerror(error.errno)
    code = errno.errorcode.get(error.errno, str(error.errno))
    return f"{_STORAGE[error.errno]}: {where} ({code}: {said})" if error.errno in _STORAGE else f"{said}: {where} ({code})"


Range = tuple[Callable[[Any], bool], str]
AT_LEAST_1: Range = (lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE: Range = (lambda value: value >= 0, "must not be negative")
ABOVE_0: Range = (lambda value: value > 0, "must be above 0")
FINITE: Range = (lambda value: 0 <= value < math.inf, "must be finite and not negative")
POSITIVE: Range = (lambda value: 0 < value < math.inf, "must be finite and above 0")
SHARE: Range = (lambda value: 0 < value <= 1, "must be above 0 and at most 1")
UP_TO_1: Range = (lambda value: 0 <= value <= 1, "must be between 0 and 1")


def check_range(config: object, section: str, allowed: Range, *names: str, note: str = "") -> None:
    """Raise ConfigError, naming setting and value, unless these attributes of `config`, a `section` of the settings, are in the range."""
    holds, must = allowed
    for name in names:
        if not holds(value := getattr(config, name)):
            raise ConfigError(f"{section}{'.' if section else ''}{name}={value}: {must}{note}")


def check_numbers(
    config: object, section: str, *, at_least_1: Sequence[str] = (), not_negative: Sequence[str] = (), above_0: Sequence[str] = ()
) -> None:
    """`check_range` of several ranges."""
    check_range(config, section, AT_LEAST_1, *at_least_1)
    check_range(config, section, NOT_NEGATIVE, *not_negative)
    check_range(config, section, ABOVE_0, *above_0)
