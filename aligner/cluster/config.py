"""Where components compute, and settings of the local launcher. No heavy imports: the config root reads this module."""

from dataclasses import dataclass
from enum import Enum

from aligner.errors import AT_LEAST_1, FINITE, POSITIVE, check_range


class Placement(str, Enum):
    """Where a run's components compute."""

    separate = "separate"
    colocated = "colocated"


@dataclass(kw_only=True, slots=True)
class LocalLauncherConfig:
    """Time limits of the local launcher."""

    grace_seconds: float = 15.0  # after a process died, or the first Ctrl-C: for the main component to save a checkpoint and stop
    shutdown_timeout_seconds: float = 20.0  # from SIGTERM to SIGKILL, for everything that still runs at the end
    ready_timeout_seconds: float = 180.0  # from a server's start to its registration in services/
    num_failure_lines: int = 20  # last output lines shown of a process that died
    max_server_restarts: int = 0  # how often a server that died starts again, from its last checkpoint; 0: its death ends the run
    lease_seconds: float = 60.0  # processes exit after this long without a heartbeat from the launcher

    def __post_init__(self) -> None:
        check_range(self, "local_launcher", FINITE, "grace_seconds", "shutdown_timeout_seconds", "max_server_restarts")
        check_range(self, "local_launcher", AT_LEAST_1, "num_failure_lines")
        check_range(self, "local_launcher", POSITIVE, "ready_timeout_seconds", "lease_seconds")
