"""The `srun` command of a step, in a container or in a virtual environment.

One variable chooses: ALIGNER_CONTAINER is `pyxis:IMAGE` (srun's own containers, by Pyxis and enroot), `apptainer:IMAGE.sif`, or empty for
the virtual environment in ALIGNER_VENV, else the one that was active at submission, else `.venv` of the checkout. ALIGNER_MOUNTS adds
directories to mount (`/data,/models:/models:ro`) besides the checkout, the submission's and the run's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from aligner.cluster.slurm.spec import ComponentSpec, ContainerConfig, ContainerGpu, GpuRequest, SlurmConfig
from aligner.errors import ConfigError


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
