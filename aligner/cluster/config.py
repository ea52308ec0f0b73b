"""Where components compute, and settings of the local launcher (a module without heavy imports: the config root reads it)."""

from dataclasses import dataclass
from enum import Enum

from aligner.errors import ConfigError


class Placement(str, Enum):
    """Where a run's components compute."""

    separate = "separate"
    colocated = "colocated"


@dataclass(kw_only=True, slots=True)
class LocalLauncherConfig:
    """How long the local launcher waits for what."""

    grace_seconds: float = 15.0  # after a process died, or the first Ctrl-C: for the main component to save a checkpoint and stop
    shutdown_timeout_seconds: float = 20.0  # from SIGTERM to SIGKILL, for everything that still runs at the end
    ready_timeout_seconds: float = 180.0  # from a server's start to its registration in services/
    num_failure_lines: int = 20  # last output lines of a process that died, which are shown
    max_server_restarts: int = 0  # how often a server that died starts again, from its last checkpoint; 0: its death ends the run
    lease_seconds: float = 60.0  # processes that hear nothing of the launcher for so long leave

    def __post_init__(self) -> None:
        for name, value in (
            ("grace_seconds", self.grace_seconds),
            ("shutdown_timeout_seconds", self.shutdown_timeout_seconds),
        ):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"local_launcher.{name}={value}: must be finite and not negative")
        for name, value in (("ready_timeout_seconds", self.ready_timeout_seconds), ("lease_seconds", self.lease_seconds)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"local_launcher.{name}={value}: must be finite and above 0")
        if self.max_server_restarts < 0:
            raise ConfigError(f"local_launcher.max_server_restarts={self.max_server_restarts}: must not be negative")
        if self.num_failure_lines < 1:
            raise ConfigError(f"local_launcher.num_failure_lines={self.num_failure_lines}: must be at least 1")
