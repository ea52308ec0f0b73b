"""The directory of one run: how it is made, what is recorded of each start, and which servers have registered in its `services/`."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError, LaunchError, describe_os_error
from aligner.files import publish, publish_first
from aligner.models.checkpoint.files import free_bytes
from aligner.telemetry.run_files import RunFiles

LEAST_FREE_BYTES = 16 << 20  # what a checkpoint reserves for its small files
POLICY, CRITIC, REWARD_MODEL, REFERENCE = "policy", "critic", "reward_model", "reference"  # folders below `checkpoints`


@dataclass(frozen=True, slots=True)
class RunDirectory(RunFiles):
    """The directory of a run whose components this process starts, or belongs to."""

    def create(self) -> RunDirectory:
        """Make the directory (mode 0700) and its sub-directories. Raises ConfigError if it cannot be, or is not this user's alone."""
        try:
            return self._create()
        except OSError as error:
            raise ConfigError(f"run.directory={self.path}: {describe_os_error(error, self.path)}") from error

    def _create(self) -> RunDirectory:
        for path in (self.path, *self.path.parents):
            if path.exists() and not path.is_dir():
                raise ConfigError(f"run.directory={self.path}: {path} exists and is not a directory")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"run.directory={self.path}: belongs to user {status.st_uid}, this process runs as {os.getuid()}")
        if status.st_mode & 0o022:
            raise ConfigError(
                f"run.directory={self.path}: can be written by others (mode {status.st_mode & 0o777:o}): "
                f"they could replace its services and checkpoints. Run: chmod 700 {self.path}"
            )
        if status.st_mode & 0o077:
            self.path.chmod(0o700)
            print(
                f"run.directory={self.path}: others could read it (mode {status.st_mode & 0o777:o}), and it holds secrets: it is 700 now",
                flush=True,
            )
        for sub in (self.tensorboard, self.logs, self.services, self.checkpoints, self.rollouts, self.journal, self.health):
            sub.mkdir(mode=0o700, exist_ok=True)
        self.export.mkdir(exist_ok=True)  # to be copied from here, or moved, with the mode that the umask gives
        if not self.identity.exists():
            made = {"run_id": uuid.uuid4().hex, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            publish_first(self.identity, json.dumps(made) + "\n")
        if (free := free_bytes(self.path)) < LEAST_FREE_BYTES:
            raise ConfigError(
                f"run.directory={self.path}: {free / 2**20:.1f} MiB are free there, allowed: at least {LEAST_FREE_BYTES >> 20} MiB, "
                "which a checkpoint needs to begin"
            )
        return self

    def record(self, **facts: Any) -> None:
        """Add facts about this start to `run.json`; one process at a time. Raises as `run_id`, and OSError."""
        self.run_id()
        known = json.loads(self.identity.read_text())
        publish(self.identity, lambda new: new.write_text(json.dumps(known | facts) + "\n"))


class ServiceWatch:
    """Registrations left behind by an earlier run in the same directory are removed at construction: they name dead servers."""

    def __init__(self, run_directory: RunDirectory, names: Sequence[str], expected: Sequence[str], timeout_seconds: float) -> None:
        self._run_directory = run_directory
        self._waiting = list(names)
        self._expected = frozenset(expected)
        self._timeout_seconds = timeout_seconds
        self._started = dict.fromkeys(names, time.monotonic())
        for name in names:
            self._forget(name)

    def again(self, name: str) -> None:
        """The component restarts: its old registration names a dead server."""
        self._forget(name)
        self._started[name] = time.monotonic()
        self._waiting = [*(other for other in self._waiting if other != name), name]

    def gone(self, name: str, reason: str) -> None:
        """This component will not restart: stop waiting for it."""
        self._run_directory.service(name).with_suffix(".gone").write_text(f"{reason}\n")

    def all_ended(self) -> None:
        """Every component has ended: a killed one has left a registration that names a dead process."""
        for name in self._started:
            self._run_directory.service(name).unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        for path in (self._run_directory.service(name), self._run_directory.service(name).with_suffix(".gone")):
            path.unlink(missing_ok=True)

    def poll(self) -> list[str]:
        """A line for each component that has registered since the last call. Raises LaunchError if an expected one is late."""
        now = time.monotonic()
        self._started |= {name: now for name in self._waiting if waits_for_its_turn(self._run_directory, name)}
        ready = [name for name in self._waiting if is_ready(self._run_directory, name)]
        self._waiting = [name for name in self._waiting if name not in ready]
        expected = [name for name in self._waiting if name in self._expected]
        late = [name for name in expected if now - self._started[name] > self._timeout_seconds]
        if late:
            missing = ", ".join(str(self._run_directory.service(name)) for name in late)
            raise LaunchError(
                f"{' and '.join(late)} not ready: waited {now - self._started[late[0]]:.0f} s for {missing} "
                f"(allowed: ready_timeout_seconds={self._timeout_seconds:g}); see its log in {self._run_directory.logs}"
            )
        urls = [(_record(self._run_directory, name) or {}).get("url") for name in ready]
        places = [f" at {url}" if url else "" for url in urls]
        return [f"{name}: ready after {now - self._started[name]:.1f} s{place}" for name, place in zip(ready, places, strict=True)]


def is_ready(run_directory: RunDirectory, name: str) -> bool:
    """Whether a component has registered as ready: it registers as `loading` when it starts."""
    record = _record(run_directory, name)
    return record is not None and record.get("state") not in ("loading", "waiting")


def waits_for_its_turn(run_directory: RunDirectory, name: str) -> bool:
    """Whether a component waits to load until others leave the shared GPUs: its time begins afterwards."""
    return (_record(run_directory, name) or {}).get("state") == "waiting"


def _record(run_directory: RunDirectory, name: str) -> dict[str, object] | None:
    try:
        record = json.loads(run_directory.service(name).read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:  # only shown, never used: the clients read it with their own checks
        return {}
    return record if isinstance(record, dict) else {}
