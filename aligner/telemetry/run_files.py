"""The names of the files in a run's directory, and who the run is. Standard library only: the conductor reads it on bare hosts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from aligner.errors import LaunchError


class _In:
    """A file or folder of the run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFiles, owner: type[RunFiles]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of one run (absolute, so that they hold in every component whatever its working directory)."""

    path: Path

    tokenizer = _In("tokenizer")  # the model's, with the chat template of `data.chat_template` if that is set: for checkpoints and exports
    config = _In("config.yaml")  # the resolved configuration, as composed
    metrics = _In("metrics.jsonl")  # one JSON object per step
    tensorboard = _In("tensorboard")
    logs = _In("logs")
    hub = _In("hub")  # a file for every name of the Hugging Face Hub in the settings: the commit that the run began with, and keeps
    services = _In("services")  # `<name>.json` of every server that is ready
    checkpoints = _In("checkpoints")
    rollouts = _In("rollouts")  # `step_%06d.jsonl` with sample rollouts
    validation = _In("validation")  # `step_%06d.jsonl` with the responses to the first validation prompts; made by the first validation
    evaluations = _In("evaluations")  # `<time>.json` and `.md`: what `aligner eval` has measured of the run's policy
    export = _In("export")  # Hugging Face format
    adapter = _In("adapter")  # PEFT's format, if adapters were trained
    identity = _In("run.json")  # the run's id, chosen once and kept through every restart; the newest start's precision
    secret = _In("secret")  # token that every request to a server carries (mode 0600)
    lease = _In("lease.json")  # touched by the starter of the run's components while it lives
    turn = _In("turn")  # locked by the component that has the GPUs which several share
    attempts = _In("attempts.jsonl")  # one line for every start and every end of a job of this run
    jobs = _In("jobs")  # `<job id>/` of every Slurm job: what it ran (`spec.json`, `script.sub`) and how each rank ended (`outcomes/`)
    done = _In("done.json")  # exists once the run has reached its last step and exported its result
    images = _In("images")  # every image of the data, named by its digest
    journal = _In("journal")  # requests to a training server, kept until a checkpoint of both sides covers them
    judges = _In("judges")  # `<rank>/<reward>.jsonl`: what judges answered, by the digest of the question
    teacher = _In("teacher")  # `train/` and `validation/` with a teacher's log-probs
    reference = _In("reference")  # a frozen reference's log-probs, if precomputed
    written = _In("written")  # records of a job that generates or annotates: `parts/`, and `records.jsonl` once it has ended
    skipped_steps = _In("skipped_steps.json")  # the training steps that the run skips, and why
    learnt_nothing = _In("learnt_nothing.txt")  # why a run that reached its last step is useless
    health = _In("health")  # `<component>.<rank>.json`: each rank's phase and its start time
    trace = _In("trace")  # `<component>.<rank>.jsonl`: what each rank did when (`aligner.telemetry.recording`)
    stacks = _In("stacks")  # every rank's stack at the time of a stall

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    def __fspath__(self) -> str:
        return str(self.path)

    def log(self, component: str, rank: int) -> Path:
        """Raw stdout and stderr of one process."""
        return self.logs / f"{component}.{rank}.log"

    def calls(self, component: str, rank: int) -> Path:
        """Which user code the process is calling (`aligner.settings.user_code`)."""
        return self.health / f"{component}.{rank}.calls"

    def service(self, component: str) -> Path:
        """Where a server of this name registers itself."""
        return self.services / f"{component}.json"

    def run_id(self) -> str:
        """The run's id, 32 hexadecimal digits. Raises LaunchError if the run was never begun, or the file is damaged."""
        return self._identified("run_id")

    def first_day(self) -> date:
        """The day on which the run was begun. Raises as `run_id`."""
        return date.fromisoformat(self._identified("created")[:10])

    def _identified(self, name: str) -> str:
        try:
            return str(json.loads(self.identity.read_text())[name])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{self.identity}: cannot read the run's {name}: {error}") from error
