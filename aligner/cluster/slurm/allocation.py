"""The job that this process runs in: as Slurm's variables describe it, and what its signals request."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster.slurm.spec import JobSpec
from aligner.errors import ConfigError

# Set for the components' processes of one job; the next job must not inherit them.
OWN_VARIABLES = ("ALIGNER_ATTEMPT", "ALIGNER_LEASE", "ALIGNER_OUTCOMES", "ALIGNER_END_TIME", "ALIGNER_COMPONENT")
CONTINUES = "ALIGNER_CONTINUES"
# A person's choices for the job.
CHOICES = ("ALIGNER_HOME", "ALIGNER_VENV", "ALIGNER_PYTHON", "ALIGNER_CONTAINER", "ALIGNER_MOUNTS", "ALIGNER_PREFLIGHT")
# Set in a job that was submitted with --export: its steps, and jobs that it submits, would get only those variables.
_EXPORT = "SLURM_EXPORT_ENV"


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """`jobs[k]` and, in one job, `num_nodes[k]` belong to part k. `beside`: the other parts' jobs (`slurm.separate`)."""

    job: str
    jobs: tuple[str, ...]
    num_nodes: tuple[int, ...]
    name: str
    node: str
    submit_directory: Path
    continues: str  # the job that submitted this one; empty: a person did
    beside: tuple[str, ...] = ()

    def step_options(self, part: int) -> list[str]:
        """The options of srun for a step on the nodes of this part."""
        if self.beside:
            return [f"--jobid={self.jobs[part]}"] if part else []
        return [f"--het-group={part}"] if len(self.jobs) > 1 else []

    def check(self, spec: JobSpec) -> None:
        """Raise ConfigError if the job does not match its config: the script was rendered for other settings."""
        wanted = [max(component.num_nodes for component in part) for part in spec.parts()]
        if spec.is_separate:
            if len(self.jobs) != len(wanted) or not self.beside:
                raise ConfigError("slurm.separate=true: the job is submitted with its servers' jobs, by `aligner launch slurm --separate`")
            wanted = wanted[:1]
        if list(self.num_nodes) != wanted:
            parts = ", ".join(f"{one.name} {one.num_nodes}" for one in spec.components)
            raise ConfigError(
                f"this job has {' + '.join(map(str, self.num_nodes))} nodes, its config requires {' + '.join(map(str, wanted))} ({parts}): "
                "the script was made for other settings; `aligner launch slurm CONFIG ...` makes a matching one"
            )


def allocation(environ: Mapping[str, str], beside: Sequence[str] = ()) -> Allocation:
    """`beside` are the jobs of the other parts. Raises ConfigError outside a batch script."""
    if "SLURM_JOB_ID" not in environ or "SLURM_SUBMIT_DIR" not in environ:
        raise ConfigError("this is the body of a batch script: submit it with sbatch")
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    groups = [f"_HET_GROUP_{index}" for index in range(size)] if size > 1 else [""]
    return Allocation(
        job=environ["SLURM_JOB_ID"],
        jobs=(*(environ[f"SLURM_JOB_ID{group}"] for group in groups), *beside),
        num_nodes=tuple(int(environ[f"SLURM_JOB_NUM_NODES{group}"]) for group in groups),
        name=environ.get("SLURM_JOB_NAME", "aligner"),
        node=environ.get("SLURMD_NODENAME", ""),  # HOSTNAME is the submitting host's
        submit_directory=Path(environ["SLURM_SUBMIT_DIR"]),
        continues=environ.get(CONTINUES, ""),
        beside=tuple(beside),
    )


def step_environment(
    environ: Mapping[str, str], home: Path | None, *, in_container: bool = False, of_another_job: bool = False
) -> dict[str, str]:
    """The whole environment of a step: the checkout `home` first on Python's path, no variables that name another host; `in_container` none
    of the host's packages, `of_another_job` none of this job's variables, which have other sizes."""
    left_out = ("HOSTNAME", _EXPORT, *OWN_VARIABLES)
    kept = {name: value for name, value in environ.items() if name not in left_out and not (of_another_job and _is_slurms(name))}
    given = [] if in_container else environ.get("PYTHONPATH", "").split(":")
    kept["PYTHONPATH"] = ":".join(dict.fromkeys([*([str(home)] if home else []), *filter(None, given)]))
    if in_container:
        kept["PYTHONNOUSERSITE"] = "1"
    elif not kept["PYTHONPATH"]:
        del kept["PYTHONPATH"]
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("PYTHONUNBUFFERED", "1")
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def submission_environment(environ: Mapping[str, str], job: str) -> dict[str, str]:
    """Environment of a following job: this one's without the variables set by Slurm and the conductor."""
    kept = {name: value for name, value in environ.items() if name not in OWN_VARIABLES and not _is_slurms(name)}
    return {**kept, CONTINUES: job}


def _is_slurms(name: str) -> bool:
    return name.startswith("SLURM") and name != "SLURM_CONF"


def export_option(environ: Mapping[str, str]) -> str:
    """Which variables sbatch gives a following job: all, or, if this job did not get all, the required ones."""
    is_all = environ.get(_EXPORT, "ALL").split(",")[0] == "ALL"
    return "--export=ALL" if is_all else f"--export={','.join([*(name for name in CHOICES if name in environ), CONTINUES])}"


class StopRequests:
    """Installed for the life of the process. `--signal=B:USR1@...` sends SIGUSR1; scancel, preemption and the time limit send SIGTERM."""

    def __init__(self) -> None:
        self.stop = False
        self.terminate = False

    def install(self) -> None:
        """From the main thread, before anything is started."""

        def note(number: int, frame: object) -> None:
            self.stop = self.stop or number == signal.SIGUSR1
            self.terminate = self.terminate or number != signal.SIGUSR1

        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    @property
    def any(self) -> bool:
        return self.stop or self.terminate
