"""Settings of the local launcher (a module without heavy imports: the config root reads it)."""

from dataclasses import dataclass

from aligner.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LocalLauncherConfig:
    """How long the local launcher waits for what.

    `grace_seconds`: after a process died (or the first Ctrl-C), how long the main component may take to notice, save a checkpoint and stop.
    `shutdown_timeout_seconds`: between SIGTERM and SIGKILL for everything that still runs at the end.
    `ready_timeout_seconds`: how long a server may take to register itself in `services/`.
    `num_failure_lines`: how many of the last output lines of a process that died are shown.
    `max_server_restarts`: how often a server that died is started again, from its last checkpoint, while the actor waits. 0: its death ends
    the run: somebody is watching, and a server that dies on one's own machine has found a bug or the end of its memory.
    `lease_seconds`: processes that hear nothing of the launcher for so long leave by themselves.
    """

    grace_seconds: float = 15.0
    shutdown_timeout_seconds: float = 20.0
    ready_timeout_seconds: float = 180.0
    num_failure_lines: int = 20
    max_server_restarts: int = 0
    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (
            ("grace_seconds", self.grace_seconds),
            ("shutdown_timeout_seconds", self.shutdown_timeout_seconds),
        ):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"LocalLauncherConfig.{name} is {value}; allowed: a finite number >= 0")
        for name, value in (("ready_timeout_seconds", self.ready_timeout_seconds), ("lease_seconds", self.lease_seconds)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"LocalLauncherConfig.{name} is {value}; allowed: a finite number > 0")
        if self.max_server_restarts < 0:
            raise ConfigError(f"LocalLauncherConfig.max_server_restarts is {self.max_server_restarts}; allowed: >= 0")
        if self.num_failure_lines < 1:
            raise ConfigError(f"LocalLauncherConfig.num_failure_lines is {self.num_failure_lines}; allowed: >= 1")
