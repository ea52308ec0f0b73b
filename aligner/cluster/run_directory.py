"""The directory of one run: how it is made, and what is recorded of each start."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError, describe_os_error
from aligner.files import publish_first
from aligner.telemetry.run_files import RunFiles

LEAST_FREE_BYTES = 16 << 20  # what a checkpoint reserves for its small files
POLICY, CRITIC, REWARD_MODEL, REFERENCE = "policy", "critic", "reward_model", "reference"  # folders below `checkpoints`


@dataclass(frozen=True, slots=True)
class RunDirectory(RunFiles):
    """The directory of a run whose components this process starts, or belongs to."""

    def create(self) -> RunDirectory:
        """Make the directory (mode 0700: it holds the servers' access token) and its sub-directories; existing ones stay, with that mode.

        Raises ConfigError: the path is not a directory, belongs to someone else, is writable by others or not by this user, or is full.
        """
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
        self._identify()
        status = os.statvfs(self.path)
        if (free := status.f_bavail * status.f_frsize) < LEAST_FREE_BYTES:
            raise ConfigError(
                f"run.directory={self.path}: {free / 2**20:.1f} MiB are free there, allowed: at least {LEAST_FREE_BYTES >> 20} MiB, "
                "which a checkpoint needs to begin"
            )
        return self

    def record(self, **facts: Any) -> None:
        """Add facts about this start to `run.json`; one process at a time. Raises as `run_id`, and OSError."""
        self.run_id()
        own = self.path / f".run.{uuid.uuid4().hex}.json"
        own.write_text(json.dumps(json.loads(self.identity.read_text()) | facts) + "\n")
        own.replace(self.identity)

    def _identify(self) -> None:
        """Choose the run's id if it has none."""
        if self.identity.exists():
            return
        made = {"run_id": uuid.uuid4().hex, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        publish_first(self.identity, json.dumps(made) + "\n")
