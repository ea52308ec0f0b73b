"""What the local launcher starts: a component is one SPMD job of N processes that run the same command; where components compute, and the
launcher's settings. No heavy imports: the config root reads this module."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from aligner.errors import AT_LEAST_1, FINITE, POSITIVE, ConfigError, LaunchError, check_range

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # it becomes a file name
_VERSION_SECONDS = 120.0
_FIRST_PORT, _LAST_PORT, _NUM_TRIES = 15000, 32768, 1000


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """`env` joins every rank's; the run ends with the `main` components. Of the one with `terminal`, rank 0 draws directly."""

    name: str
    command: tuple[str, ...]
    num_processes: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    main: bool = False
    terminal: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in ("run", "launcher"):
            raise ConfigError(f"component name {self.name!r}; allowed: letters, digits, '_' and '-', but not 'run' or 'launcher'")
        if not self.command:
            raise ConfigError(f"component {self.name}: no command; allowed: a program and its arguments")
        if self.num_processes < 1:
            raise ConfigError(f"component {self.name}: num_processes={self.num_processes}: must be at least 1")

    def prefix(self, rank: int) -> str:
        """A rank's name in the output."""
        return self.name if self.num_processes == 1 else f"{self.name}.{rank}"


def interpreter(component: str, environment: str) -> str:
    """The Python interpreter of `<component>.environment`, a virtual environment's folder or its interpreter; this one if it is empty.
    Links are not resolved: an environment is found by the path of its own interpreter."""
    if not environment:
        return sys.executable
    path = Path(environment).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"{component}.environment={environment}: no Python interpreter at {python}; allowed: a virtual environment's folder or "
            "interpreter, or empty (the launcher's own)"
        )
    return str(python)


def check_installed(component: str, python: str, version: str) -> None:
    """Raise ConfigError unless the interpreter of `<component>.environment` imports this package, in this `version`."""
    command = [python, "-c", "import aligner; print(aligner.__version__)"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{component}.environment: {python} cannot be run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{component}.environment: {python} cannot import aligner ({last}); install aligner {version} there too")
    if (found := done.stdout.strip()) != version:
        raise ConfigError(f"{component}.environment: {python} has aligner {found}, and the launcher {version}; allowed: the same version")


def activated(python: str, base: Mapping[str, str]) -> dict[str, str]:
    """What activating the interpreter's virtual environment sets, so that its programs are found; nothing if it is the launcher's own."""
    folder = Path(python).parent
    is_environment = any((folder.parent / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))
    if python == sys.executable or not is_environment:
        return {}
    return {"VIRTUAL_ENV": str(folder.parent), "PATH": os.pathsep.join([str(folder), *filter(None, [base.get("PATH", "")])])}


def check_components(components: Sequence[Component], expect_services: Sequence[str]) -> None:
    """Raise ConfigError if the components cannot form a run."""
    names = [component.name for component in components]
    if len(set(names)) != len(names):
        raise ConfigError(f"component names are {names}; allowed: each name once")
    if not any(component.main for component in components):
        raise ConfigError(f"none of the components {names} is main; allowed: at least one (the run ends with it)")
    if sum(component.terminal for component in components) > 1:
        raise ConfigError("more than one component has terminal=True; allowed: one")
    for name in expect_services:
        if name not in names:
            raise ConfigError(f"expect_services names {name!r}; allowed: one of {names}")


def rank_environment(component: Component, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank, as torchrun would set it; what is already set for threads and buffering is kept."""
    world = str(component.num_processes)
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **activated(component.command[0], base),
        **component.env,
    }


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that are free now, below those that Linux hands out to outgoing connections. Another program can take one before a
    rank binds it; that rank then fails. Raises LaunchError if too few are free."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), _NUM_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise LaunchError(f"only {len(found)} of {count} TCP ports needed are free among {_NUM_TRIES} tried from {_FIRST_PORT} to {_LAST_PORT}")
