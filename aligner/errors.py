"""The exceptions that this package raises for things a user can mend.

A bad value raises `ConfigError`, a `ValueError` that names field, value and what is allowed; run-time failures are `AlignerError`s too.
"""


class AlignerError(Exception):
    """Root of the tree: catch this to catch every run-time error of the package."""


class ConfigError(AlignerError, ValueError):
    """A setting that cannot work: names the field, the value and what is allowed."""


class DataError(AlignerError, ValueError):
    """A bad record: names file and line."""


class LaunchError(AlignerError):
    """The ranks of a component could not be started or do not agree with each other."""


class CheckpointError(AlignerError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class EngineError(AlignerError):
    """A rollout engine cannot generate what was asked for."""


class ServerError(AlignerError):
    """A critic or reward server could not do what was asked; root of the server errors."""


class ServerUnreachable(ServerError):
    """Nothing answers at the address: says which server, where and since when."""


class ServerTimeout(ServerError):
    """The server took longer than the configured deadline."""


class RequestRejected(ServerError):
    """The server answered with an error: carries its message."""
