"""The steps of a job: one `srun` for each start of a component, in a container or a virtual environment, watched and ended together.

One variable chooses: ALIGNER_CONTAINER is `pyxis:IMAGE` (srun's own containers, by Pyxis and enroot), `apptainer:IMAGE.sif`, or empty for
the virtual environment in ALIGNER_VENV, else the one that was active at submission, else `.venv` of the checkout. ALIGNER_MOUNTS adds
directories to mount (`/data,/models:/models:ro`) besides the checkout, the submission's and the run's directory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from aligner.cluster import outcomes
from aligner.cluster.component import activated
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import Allocation, StopRequests, step_environment
from aligner.cluster.slurm.client import JobRecord, SlurmClient
from aligner.cluster.slurm.spec import ComponentSpec, ContainerConfig, ContainerGpu, GpuRequest, JobSpec, SlurmConfig
from aligner.errors import ConfigError, LaunchError
from aligner.telemetry.terminal import plain


class ContainerKind(str, Enum):
    """Who makes the containers."""

    none = "none"
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What the components run in. `home`: the checkout (None: a wheel). `directory`: where they start, the submitter's."""

    kind: ContainerKind
    image: str
    python: str
    mounts: tuple[str, ...]
    home: Path | None
    directory: Path

    @property
    def is_container(self) -> bool:
        return self.kind is not ContainerKind.none

    def with_mount(self, path: Path) -> Runtime:
        """The same with one more mounted directory."""
        return replace(self, mounts=tuple(dict.fromkeys((*self.mounts, f"{path}:{path}"))))


def runtime(environ: Mapping[str, str], *, home: Path | None, directory: Path) -> Runtime:
    """The selected runtime. Raises ConfigError for a container of an unknown kind and for an environment without Python."""
    chosen, extra = environ.get("ALIGNER_CONTAINER", ""), environ.get("ALIGNER_MOUNTS", "")
    places = dict.fromkeys((*([str(home)] if home else []), str(directory), *filter(None, extra.split(","))))
    mounts = tuple(place if ":" in place else f"{place}:{place}" for place in places)
    if chosen:
        kind, _, image = chosen.partition(":")
        if kind not in (ContainerKind.pyxis.value, ContainerKind.apptainer.value) or not image:
            allowed = "pyxis:IMAGE, apptainer:IMAGE.sif, or empty for a virtual environment"
            raise ConfigError(f"ALIGNER_CONTAINER={chosen!r}; allowed: {allowed}")
        python = "python3"
    else:
        kind, image, python = ContainerKind.none.value, "", _python(environ, home)
    return Runtime(kind=ContainerKind(kind), image=image, python=python, mounts=mounts, home=home, directory=directory)


def _python(environ: Mapping[str, str], home: Path | None) -> str:
    """The interpreter of the virtual environment that is named, active, or in the checkout; else this one, or the one on PATH."""
    own = str(home / ".venv") if home and (home / ".venv").is_dir() else "" if home else sys.prefix
    folder = environ.get("ALIGNER_VENV") or environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or own
    if not folder:
        return "python3"
    python = str(Path(folder).absolute() / "bin" / "python")
    if not os.access(python, os.X_OK):
        raise ConfigError(f"ALIGNER_VENV={folder}: {python} does not exist; name an environment that all nodes see, or ALIGNER_CONTAINER")
    return python


EXPORT = "--export=ALL"  # of every srun: the job's own --export must not limit its steps


_SHOWN = {ContainerGpu.nvidia: ["--nv"], ContainerGpu.rocm: ["--rocm"], ContainerGpu.none: []}


def wrapped(where: Runtime, program: Sequence[str], container: ContainerConfig, *, has_gpus: bool) -> tuple[list[str], list[str]]:
    """(options of srun, command of each task) that run the Python interpreter with these arguments."""
    command = [where.python, "-u", *program]
    if where.kind is ContainerKind.pyxis:
        options = [
            f"--container-image={where.image}",
            f"--container-mounts={','.join(where.mounts)}",
            f"--container-workdir={where.directory}",
            *container.options,
        ]
        return [*options, "--container-env=PYTHONPATH"], command  # the image's own would come first
    if where.kind is ContainerKind.apptainer:
        binds = [part for mount in where.mounts for part in ("--bind", mount)]
        shown = _SHOWN[container.gpu] if has_gpus else []
        options = [*shown, *binds, "--pwd", str(where.directory), *container.options]
        return [], ["apptainer", "exec", *options, where.image, *command]
    return [], command


# Slurm shows every step all GPUs of the job on a node; a component keeps its own, counted from 1. $1: all, if Slurm does not count GPUs.
_SEE = (
    'CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$1}"; shift; : "${CUDA_VISIBLE_DEVICES:?is not set: Slurm gave this step no GPUs}"; '
    'export CUDA_VISIBLE_DEVICES="$(printf %s "$CUDA_VISIBLE_DEVICES" | cut -d, -f"$0")"; exec "$@"'
)
# On the node, outside of the container that a task itself starts.
_SETUP = (
    'eval "$1" || { echo "error: slurm.setup ended with exit code $? on ${SLURMD_NODENAME:-this node}" >&2; exit 1; }; shift; exec "$@"'
)


# srun's own %t is not the rank in every version (26.05: of a heterogeneous job's steps).
_LOG = 'exec >>"$0.${SLURM_PROCID:?is not set by srun}.log" 2>&1; exec "$@"'


def srun_command(
    component: ComponentSpec,
    slurm: SlurmConfig,
    where: Runtime,
    *,
    on: Sequence[str],
    log: str,
    shares: bool = False,
    container: ContainerConfig | None = None,
) -> list[str]:
    """The step that runs a component on the part of the job that the options `on` name. Rank 3 writes to `<log>.3.log`, and Slurm itself to
    `<log>.step.log`. `shares`: other components have steps on the same nodes.
    """
    where = replace(where, python=component.python or where.python)
    options, command = wrapped(where, component.program, container or ContainerConfig(), has_gpus=component.gpus_per_node > 0)
    if component.gpus is not None:
        every = ",".join(map(str, range(component.gpus_per_node))) if slurm.gpu_request is GpuRequest.none else ""
        command = [*(["sh", "-c", _SEE, component.gpus, every] if component.gpus else ["env", "CUDA_VISIBLE_DEVICES="]), *command]
    if slurm.setup and where.kind is not ContainerKind.pyxis:  # whose containers Slurm starts, with the batch script's environment
        command = ["bash", "-c", _SETUP, "bash", slurm.setup, *command]
    command = ["sh", "-c", _LOG, log, *command]
    return [
        "srun",
        *on,
        EXPORT,
        f"--job-name={component.name}",
        f"--nodes={component.num_nodes}",
        f"--ntasks={component.num_ranks}",
        f"--ntasks-per-node={component.ranks_per_node}",
        *slurm.gpu_options(component.gpus_per_node),
        *([f"--cpus-per-task={slurm.cpus_per_rank}"] if slurm.cpus_per_rank else []),  # srun no longer takes it from the job
        *([f"--mpi={slurm.mpi}"] if slurm.mpi else []),
        "--kill-on-bad-exit=1",
        f"--wait={slurm.spread_seconds}",
        *(["--overlap"] if shares else []),  # else the first step would have all processors and the memory to itself
        "--input=none",
        f"--output={log}.step.log",
        "--open-mode=append",
        f"--chdir={where.directory}",
        *slurm.srun_options,
        *options,
        *command,
    ]


_POLL_SECONDS = 0.1
_FORCE_SECONDS = 15.0  # from srun's own forced end to the kernel's
_READ_BYTES = 16384


class Step:
    """One start of a component. `srun`'s exit code is of little use; `outcome` is the ranks' own record."""

    def __init__(self, component: ComponentSpec, process: subprocess.Popen[bytes], outcomes_directory: Path, log: Path) -> None:
        self.component = component
        self.name = component.name
        self.started_at = time.monotonic()
        self.is_ready = False
        self._process = process
        self._outcomes = outcomes_directory
        self._log = log  # Slurm's own messages on this and earlier starts
        self._log_began = log.stat().st_size if log.exists() else 0

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def srun_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def outcome(self) -> outcomes.Outcome | None:
        """What explains its end; None if every rank was killed."""
        return outcomes.decisive(outcomes.read(self._outcomes))

    def describe_end(self) -> str:
        outcome, code = self.outcome(), self.srun_code()
        if outcome is None and self._was_out_of_memory():
            return f"{self.name} was killed: it took more memory than Slurm gave its step (slurm.memory)"
        if outcome is None:
            return f"{self.name} was killed, or its node was lost (srun's exit code {code})"
        message = f": {outcome.message}" if outcome.message else ""
        return f"{self.name}: rank {outcome.rank} ended with exit code {outcome.code}{message}"

    def _was_out_of_memory(self) -> bool:
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_began)
                return re.search(rb"(?i)oom.kill", file.read(_READ_BYTES)) is not None
        except FileNotFoundError:
            return False

    def send(self, number: int) -> None:
        """Signal srun, which passes SIGUSR1 on to every task and ends the step at once on SIGTERM."""
        if not self.has_ended():
            self._process.send_signal(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The common part of a job's steps: what the conductor is given, with the run's directory."""

    spec: JobSpec
    run: RunDirectory
    allocation: Allocation
    runtime: Runtime
    client: SlurmClient
    requests: StopRequests
    script: Path
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    say: Callable[[str], None]

    def start(self, component: ComponentSpec, *, key: str, variables: Mapping[str, str]) -> Step:
        """Start a component on its part of the job; its ranks write to `<run>/logs`. `key` is new for every start."""
        there = self.allocation
        outcomes_directory = self.run.jobs / there.job / "outcomes" / key
        log = self.run.logs / f"{component.name}.step.log"
        elsewhere = bool(there.beside and component.part)
        command = srun_command(
            component,
            self.spec.slurm,
            self.runtime,
            on=there.step_options(component.part),
            log=f"{self.run.logs}/{component.name}",
            shares=self.spec.shares(component),
            container=self.spec.container,
        )
        environment = {
            **step_environment(self.environ, self.runtime.home, in_container=self.runtime.is_container, of_another_job=elsewhere),
            **activated(component.python or sys.executable, self.environ),
            **variables,
            "ALIGNER_COMPONENT": component.name,
            outcomes.VARIABLE: str(outcomes_directory),
        }
        try:
            # A group of its own: a signal to the batch script's group must not end srun before the conductor has decided anything.
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"cannot start srun for {component.name}: {error}") from error
        return Step(component, process, outcomes_directory, log)

    def records(self) -> list[JobRecord]:
        """The parts of the job, as the controller knows them. Raises LaunchError."""
        return [record for job in (self.allocation.job, *self.allocation.beside) for record in self.client.show(job)]

    def lost(self, jobs: Iterable[str]) -> str:
        """Which of these jobs beside this one have ended, and with them their nodes; empty if none, or if Slurm does not answer."""
        try:
            over = [job for job in jobs if job in self.allocation.beside and self.client.is_over(job)]
        except LaunchError as error:
            self.say(f"warning: cannot ask whether the servers' jobs still run: {error}")
            return ""
        return f"job {' and '.join(over)}, which held nodes of this run, has ended" if over else ""

    def stop(self, steps: Sequence[Step], pause: Callable[[float], None], *, gently: bool = True) -> None:
        """End these steps and wait for it: SIGTERM to every task, SIGKILL after `shutdown_timeout_seconds` (at once unless `gently`)."""
        running = [step for step in steps if not step.has_ended()]
        if running and gently:
            self._signal_tasks(running, "TERM")
            running = _wait(running, self.spec.slurm.shutdown_timeout_seconds, pause)
        if running:
            self.say(f"killing {', '.join(step.name for step in running)}")
            for step in running:
                step.send(signal.SIGTERM)  # srun: "forcing job termination"
            running = _wait(running, _FORCE_SECONDS, pause)
        if running:
            self._signal_tasks(running, "KILL")
            for step in running:
                step.send(signal.SIGKILL)
            running = _wait(running, _FORCE_SECONDS, pause)
        if running:
            self.say(f"srun of {', '.join(step.name for step in running)} does not end; the end of the job will end it")

    def sweep(self, names: Collection[str]) -> None:
        """Kill steps of these names whose srun has ended: a killed srun leaves its tasks running."""
        try:
            left = [step for step, name in self.client.steps(self.allocation.jobs).items() if name in names]
            if left:
                self.say(f"killing steps {', '.join(left)}, which have lost their srun")
                self.client.signal_steps(left, "KILL")
        except LaunchError as error:
            self.say(f"warning: cannot end steps that have lost their srun: {error}")

    def _signal_tasks(self, steps: Sequence[Step], name: str) -> None:
        """Signal the tasks through the controller: srun would kill them. If the controller does not answer, the timeout decides."""
        names = {step.name for step in steps}
        try:
            self.client.signal_steps([step for step, its in self.client.steps(self.allocation.jobs).items() if its in names], name)
        except LaunchError as error:
            self.say(f"warning: cannot send SIG{name} to {', '.join(sorted(names))}: {error}")

    def last_lines(self, component: ComponentSpec, rank: int, count: int, *, since: int = 0) -> list[str]:
        """The end of a rank's log after its first `since` bytes, without colours; of Slurm's own messages if the rank did not write any."""
        path = self.run.log(component.name, rank)
        path = path if path.exists() else self.run.logs / f"{component.name}.step.log"
        try:
            with path.open("rb") as file:
                file.seek(max(since, os.fstat(file.fileno()).st_size - _READ_BYTES))
                return [plain(line) for line in file.read().decode(errors="replace").splitlines()[-count:]]
        except FileNotFoundError:
            return []


def _wait(steps: Sequence[Step], seconds: float, pause: Callable[[float], None]) -> list[Step]:
    """Wait up to `seconds` for these; returns those still running."""
    deadline = time.monotonic() + seconds
    while (running := [step for step in steps if not step.has_ended()]) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    return running
