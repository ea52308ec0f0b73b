"""The directory of one run: every file that its components write or read has its name here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import LaunchError


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run (absolute, so that they hold in every component whatever its working directory)."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        """The resolved configuration, as composed."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def services(self) -> Path:
        """`<name>.json` of every server that is ready."""
        return self.path / "services"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """`step_%06d.jsonl` with sample rollouts."""
        return self.path / "rollouts"

    @property
    def export(self) -> Path:
        """Hugging Face format."""
        return self.path / "export"

    def log(self, component: str, rank: int) -> Path:
        """Raw stdout and stderr of one process."""
        return self.logs / f"{component}.{rank}.log"

    def service(self, component: str) -> Path:
        """Where a server of this name registers itself."""
        return self.services / f"{component}.json"

    def create(self) -> RunDirectory:
        """Make the directory (mode 0700: it holds the servers' access token) and its sub-directories; existing ones stay.

        Raises:
            LaunchError: the path exists and is no directory, belongs to someone else, or others may write to it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise LaunchError(f"run directory {self.path} exists and is not a directory")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.getuid():
            raise LaunchError(f"run directory {self.path} belongs to user {status.st_uid}, this process runs as {os.getuid()}")
        if status.st_mode & 0o022:
            raise LaunchError(
                f"run directory {self.path} can be written by others (mode {status.st_mode & 0o777:o}): "
                f"they could replace its services and checkpoints. Mend with: chmod 700 {self.path}"
            )
        for sub in (self.tensorboard, self.logs, self.services, self.checkpoints, self.rollouts, self.export):
            sub.mkdir(mode=0o700, exist_ok=True)
        return self
