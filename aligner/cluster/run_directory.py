"""The directory of one run: every file that its components write or read has its name here."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError, LaunchError, describe_os_error

LEAST_FREE_BYTES = 16 << 20  # what a checkpoint reserves for its small files
POLICY, CRITIC, REWARD_MODEL, REFERENCE = "policy", "critic", "reward_model", "reference"  # folders below `checkpoints`


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run (absolute, so that they hold in every component whatever its working directory)."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def tokenizer(self) -> Path:
        """The model's tokenizer with the chat template of `data.chat_template`, where that is set: what checkpoints and exports get."""
        return self.path / "tokenizer"

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
    def hub(self) -> Path:
        """A file for every name of the Hugging Face Hub in the settings: the commit that the run began with, which it keeps."""
        return self.path / "hub"

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
    def validation(self) -> Path:
        """`step_%06d.jsonl` with the responses to the first validation prompts; made by the first validation."""
        return self.path / "validation"

    @property
    def export(self) -> Path:
        """Hugging Face format."""
        return self.path / "export"

    @property
    def adapter(self) -> Path:
        """PEFT's format, where adapters were trained."""
        return self.path / "adapter"

    @property
    def identity(self) -> Path:
        """`run.json`: the run's id, chosen when the directory was made and kept through every restart; the newest start's precision."""
        return self.path / "run.json"

    @property
    def secret(self) -> Path:
        """Token that every request to a server carries (mode 0600)."""
        return self.path / "secret"

    @property
    def lease(self) -> Path:
        """Touched by the starter of the run's components while it lives."""
        return self.path / "lease.json"

    @property
    def turn(self) -> Path:
        """Locked by the component that has the GPUs which several share."""
        return self.path / "turn"

    @property
    def attempts(self) -> Path:
        """`attempts.jsonl`: one line for every start and every end of a job of this run."""
        return self.path / "attempts.jsonl"

    @property
    def jobs(self) -> Path:
        """`<job id>/` of every Slurm job of this run: what it ran (`spec.json`, `script.sub`) and how each rank ended (`outcomes/`)."""
        return self.path / "jobs"

    @property
    def done(self) -> Path:
        """`done.json` exists once the run has reached its last step and exported its result."""
        return self.path / "done.json"

    @property
    def journal(self) -> Path:
        """Requests to a training server, kept until a checkpoint of both sides covers them."""
        return self.path / "journal"

    @property
    def teacher(self) -> Path:
        """`train/` and `validation/` with a teacher's log-probs."""
        return self.path / "teacher"

    @property
    def reference(self) -> Path:
        """A frozen reference's log-probs, if precomputed."""
        return self.path / "reference"

    @property
    def written(self) -> Path:
        """The records of a job that generates or annotates: `parts/`, and `records.jsonl` once it has ended."""
        return self.path / "written"

    @property
    def skipped_steps(self) -> Path:
        """`skipped_steps.json`: the training steps that the run skips, and why."""
        return self.path / "skipped_steps.json"

    @property
    def learnt_nothing(self) -> Path:
        """Why a run that reached its last step is useless."""
        return self.path / "learnt_nothing.txt"

    @property
    def health(self) -> Path:
        """`<component>.<rank>.json`: each rank's phase and its start time."""
        return self.path / "health"

    @property
    def trace(self) -> Path:
        """`<component>.<rank>.jsonl`: what each rank did when (`aligner.telemetry.recording`); `aligner trace` makes one file of them."""
        return self.path / "trace"

    @property
    def stacks(self) -> Path:
        """Every rank's stack at the time of a stall."""
        return self.path / "stacks"

    def log(self, component: str, rank: int) -> Path:
        """Raw stdout and stderr of one process."""
        return self.logs / f"{component}.{rank}.log"

    def calls(self, component: str, rank: int) -> Path:
        """Which user code the process is calling (`aligner.settings.user_code`)."""
        return self.health / f"{component}.{rank}.calls"

    def service(self, component: str) -> Path:
        """Where a server of this name registers itself."""
        return self.services / f"{component}.json"

    def create(self) -> RunDirectory:
        """Make the directory (mode 0700: it holds the servers' access token) and its sub-directories; existing ones stay, with that mode.

        Raises:
            ConfigError: the path exists and is no directory, belongs to someone else, others may write to it, it cannot be written to, or
                there is no room.
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
                f"they could replace its services and checkpoints. Mend with: chmod 700 {self.path}"
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
                "without which no checkpoint can be begun"
            )
        return self

    def run_id(self) -> str:
        """The run's id, 32 hexadecimal digits. Raises LaunchError if `create` has not been called, or the file is damaged."""
        return self._identified("run_id")

    def first_day(self) -> date:
        """The day on which the run was begun. Raises as `run_id`."""
        return date.fromisoformat(self._identified("created")[:10])

    def _identified(self, name: str) -> str:
        try:
            return str(json.loads(self.identity.read_text())[name])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{self.identity}: cannot read the run's {name}: {error}") from error

    def record(self, **facts: Any) -> None:
        """Put what is known of this start into `run.json`; one process at a time. Raises as `run_id`, and OSError."""
        self.run_id()
        own = self.path / f".run.{uuid.uuid4().hex}.json"
        own.write_text(json.dumps(json.loads(self.identity.read_text()) | facts) + "\n")
        own.replace(self.identity)

    def _identify(self) -> None:
        """Choose the run's id if it has none. Of several concurrent processes, the first to link its file wins."""
        if self.identity.exists():
            return
        own = self.path / f".run.{uuid.uuid4().hex}.json"
        own.write_text(json.dumps({"run_id": uuid.uuid4().hex, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")
        try:
            os.link(own, self.identity)
        except FileExistsError:
            pass  # another process of the run was first
        finally:
            own.unlink()
