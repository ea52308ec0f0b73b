"""How a run is submitted to Slurm (`SlurmConfig`), and what the conductor has to run (`JobSpec`), in plain values: both the config root and
the conductor, which has nothing but Python, read this module.

A job's spec is made from the resolved config at the job's start, and kept as JSON in `<run>/jobs/<job id>/spec.json`. `render` writes the
batch script of a job: `#SBATCH` lines from the job's spec, and a body that is the same for every job.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path

from aligner.errors import ConfigError, LaunchError, check_numbers

# What `--time` takes: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]]; empty leaves it to the partition.
_TIME = re.compile(r"(?:\d+|\d+:\d{1,2}|\d+:\d{1,2}:\d{1,2}|\d+-\d{1,2}|\d+-\d{1,2}:\d{1,2}|\d+-\d{1,2}:\d{1,2}:\d{1,2}|)")
_MEMORY = re.compile(r"(?:\d+[KMGT]?|auto|)")


def _check_options(setting: str, options: Sequence[str], allowed: str) -> None:
    for option in options:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(f"{setting} has {option!r}; allowed: {allowed}, one per string")


class OnFailure(str, Enum):
    """The reaction to a component's death."""

    restart = "restart"
    end = "end"


class ContainerGpu(str, Enum):
    """Whose GPUs Apptainer shows in a container."""

    nvidia = "nvidia"
    rocm = "rocm"
    none = "none"


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """How components run in the container that ALIGNER_CONTAINER names (docs/containers.md)."""

    gpu: ContainerGpu = ContainerGpu.nvidia  # --nv or --rocm of Apptainer, for components with GPUs; Pyxis has hooks for that
    options: list[str] = field(
        default_factory=list
    )  # more options: of `apptainer exec`, or of srun for Pyxis (such as --container-writable)

    def __post_init__(self) -> None:
        _check_options("container.options", self.options, "options such as --writable-tmpfs")


class GpuRequest(str, Enum):
    """How a job asks for its nodes' GPUs."""

    auto = "auto"
    gpus_per_node = "gpus_per_node"
    gres = "gres"
    none = "none"


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Read by `aligner launch slurm` and by the conductor in the batch script. Ranks and GPUs per node are set elsewhere."""

    partition: str = ""  # empty, here and below: Slurm's default
    account: str = ""  # that the job is charged to (sbatch --account)
    qos: str = ""  # quality of service (sbatch --qos)
    constraint: str = ""  # features that nodes must have (sbatch --constraint)
    time_limit: str = "24:00:00"  # as for sbatch --time
    cpus_per_rank: int = 0  # --cpus-per-task; 0: a rank's share of cluster.cpus_per_node if that is set, else Slurm's default
    exclusive: bool = True  # whole nodes
    separate: bool = False  # one job per component, for sites without heterogeneous jobs (aligner launch slurm --separate)
    gpu_request: GpuRequest = GpuRequest.auto  # --gpus-per-node, --gres, or none if Slurm does not count GPUs; auto: as scontrol reports
    gpu_type: str = ""  # such as h100, if nodes have several types; empty: any
    options: list[str] = field(default_factory=list)  # more sbatch options for every component, such as --mem=0
    # of each node (sbatch --mem): 0 all of it, or such as 480G; empty: the site's default; auto, for nodes with GPUs: all of whole nodes,
    memory: str = "auto"  # of shared ones (slurm.exclusive=false) the planned memory and a tenth more
    setup: str = ""  # lines of bash for the batch script and before every step on its nodes, such as `module load cuda/12.8`
    srun_options: list[str] = field(default_factory=list)  # more options of srun for every step, such as --cpu-bind=none
    output: str = "%x-%j.out"  # of the batch script; the components write to <run>/logs
    mpi: str = ""  # srun --mpi=..., such as pmix if the engine needs MPI; empty: Slurm's default

    signal_seconds_before_end: int = 600  # a job is signalled to stop this long before its time limit (sbatch --signal)
    abandon_seconds: float = 120.0  # of these, kept for the end of the job: a step that lasts longer is abandoned
    successor: bool = True  # a job that has to stop submits the next one, which continues the run
    follow_up: bool = True  # a job queues a small one at its start, which submits it again after a crash (afternotok)
    gatekeeper_options: list[str] = field(default_factory=list)  # of sbatch for that small one, such as --partition=cpu

    on_server_failure: OnFailure = OnFailure.restart  # restart: that server alone, in its allocation, from its last checkpoint
    max_server_restarts: int = 3  # of all servers of a job together; the next death counts as the actor's
    on_actor_failure: OnFailure = OnFailure.restart  # restart: all components in the same allocation, from the newest checkpoint
    max_restarts_without_progress: int = 3  # after this many restarts without a newer checkpoint the run is halted
    restart_delay_seconds: float = 5.0  # pause before a component that ended starts again

    preflight: bool = True  # run `aligner preflight` before the components
    preflight_timeout_seconds: float = 1200.0  # for the whole of `aligner preflight`; then it counts as failed
    ready_timeout_seconds: float = 1800.0  # from a server's start to its registration
    grace_seconds: float = 60.0  # for the actor to notice that it cannot continue, before it is ended
    shutdown_timeout_seconds: float = 60.0  # from asking a component to end to killing it
    spread_seconds: int = 600  # how far apart the ranks of a component may end (srun --wait)
    command_timeout_seconds: float = 60.0  # one sbatch, scancel, squeue or scontrol
    lease_seconds: float = 60.0  # processes exit after this long without a heartbeat from the conductor

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time_limit):
            raise ConfigError(f"slurm.time_limit={self.time_limit}: must be minutes, hh:mm:ss or days-hh:mm:ss")
        counts = ("cpus_per_rank", "max_server_restarts", "max_restarts_without_progress", "restart_delay_seconds", "grace_seconds")
        limits = ("signal_seconds_before_end", "abandon_seconds", "preflight_timeout_seconds", "ready_timeout_seconds")
        limits += ("shutdown_timeout_seconds", "spread_seconds", "command_timeout_seconds", "lease_seconds")
        check_numbers(self, "slurm", not_negative=counts, above_0=limits)
        if self.abandon_seconds >= self.signal_seconds_before_end:
            raise ConfigError(
                f"slurm.abandon_seconds={self.abandon_seconds:g}: must be below signal_seconds_before_end={self.signal_seconds_before_end}"
            )
        if self.signal_seconds_before_end > 65535:
            raise ConfigError(f"slurm.signal_seconds_before_end={self.signal_seconds_before_end}: sbatch takes at most 65535")
        if self.gpu_request is GpuRequest.none and not self.exclusive:
            raise ConfigError("slurm.gpu_request=none: Slurm then gives GPUs to nobody in particular: set slurm.exclusive=true")
        if not re.fullmatch(r"[\w.-]*", self.gpu_type):
            raise ConfigError(f"slurm.gpu_type={self.gpu_type}: must be a type as sinfo shows it in gpu:TYPE:COUNT, such as h100")
        if not _MEMORY.fullmatch(self.memory):
            raise ConfigError(f"slurm.memory={self.memory}: must be 0 (all of a node), auto, or a number with K, M, G or T, such as 480G")
        for name, program in (("options", "sbatch"), ("gatekeeper_options", "sbatch"), ("srun_options", "srun")):
            _check_options(f"slurm.{name}", getattr(self, name), f"{program} options such as --mem=0")

    def gpu_options(self, count: int) -> list[str]:
        """The options of sbatch and srun that request `count` GPUs of each node."""
        what = f"{self.gpu_type}:{count}" if self.gpu_type else str(count)
        asked = {GpuRequest.gres: [f"--gres=gpu:{what}"], GpuRequest.none: []}.get(self.gpu_request, [f"--gpus-per-node={what}"])
        return asked if count else []


_FORMAT = 4
SPEC_LINE = "ALIGNER_SPEC="  # begins the line with the path of a job's spec


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSpec:
    """One SPMD component, on part `part` of the heterogeneous job."""

    name: str
    program: tuple[str, ...]  # arguments of the Python interpreter
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int  # of its part of the job; 0: none are asked for
    part: int = 0  # components of the same part share its nodes
    gpus: str | None = None  # those of its part that it sees, as `cut -f` takes them ("5-6", from 1; empty: none); None: all
    python: str = ""  # its interpreter, if it has an environment of its own

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A run. The first component is the one that trains (the actor); the others are servers and end with it."""

    name: str
    run_directory: str
    max_steps: int
    checkpoints: tuple[str, ...]  # folders below <run>/checkpoints; a step counts if all of them have it
    components: tuple[ComponentSpec, ...]
    preflight: tuple[str, ...]  # arguments of the Python interpreter; empty: none
    slurm: SlurmConfig
    epochs: float = 0.0  # after which it ends too; max_steps is 0 if they alone set the end
    idle_seconds: float = 3600.0  # how long servers in jobs of their own wait for an actor (server.idle_timeout_seconds)
    container: ContainerConfig = field(default_factory=ContainerConfig)

    def parts(self) -> list[list[ComponentSpec]]:
        return [[one for one in self.components if one.part == part] for part in range(1 + max(one.part for one in self.components))]

    @property
    def is_separate(self) -> bool:
        """Whether it is several jobs that begin and end together, in place of a heterogeneous one."""
        return self.slurm.separate and len(self.parts()) > 1

    def shares(self, component: ComponentSpec) -> bool:
        """Whether other components are on its nodes too."""
        return len(self.parts()[component.part]) > 1


def to_json(spec: JobSpec) -> str:
    return json.dumps({"format": _FORMAT, **asdict(spec)}, indent=1) + "\n"


def from_json(text: str) -> JobSpec:
    """Raises LaunchError for a spec of another version."""
    try:
        record = json.loads(text)
        if record.pop("format") != _FORMAT:
            raise LaunchError("the job's spec is of another version of this program: conductor and container must hold the same one")
        components = tuple(ComponentSpec(**{**one, "program": tuple(one["program"])}) for one in record.pop("components"))
        kinds = {field.name: OnFailure for field in fields(SlurmConfig) if field.name.startswith("on_")} | {"gpu_request": GpuRequest}
        settings = {name: kinds[name](value) if name in kinds else value for name, value in record.pop("slurm").items()}
        slurm, shown = SlurmConfig(**settings), record.pop("container")
        container = ContainerConfig(**shown | {"gpu": ContainerGpu(shown["gpu"])})
        tuples = {name: tuple(record.pop(name)) for name in ("checkpoints", "preflight")}
        return JobSpec(components=components, slurm=slurm, container=container, **tuples, **record)
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"the job's spec cannot be read ({error}): conductor and container must hold the same version") from error


def read_spec(path: Path) -> JobSpec:
    """Raises LaunchError if the file is missing or of another version."""
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read the job's spec: {error}") from error


_BODY = """
# Where the components run: pyxis:IMAGE or apptainer:IMAGE.sif; empty: the virtual environment ALIGNER_VENV, the active one, or .venv.
export ALIGNER_CONTAINER="${ALIGNER_CONTAINER:-}" ALIGNER_VENV="${ALIGNER_VENV:-}"
# Directories that a container sees besides this one and the run's, such as /data,/models. ALIGNER_PREFLIGHT=0: no preflight.
export ALIGNER_MOUNTS="${ALIGNER_MOUNTS:-}" ALIGNER_PREFLIGHT="${ALIGNER_PREFLIGHT:-1}"

home="${ALIGNER_HOME:-$SLURM_SUBMIT_DIR}" # the checkout, on a file system that every node sees; else: installed from a wheel
if [ -d "$home/aligner" ]; then export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}"; fi
# The conductor needs Python 3.10 or newer on the first node, and no packages: ALIGNER_PYTHON, or the first of these that will do.
fits='import importlib.util as u, sys; sys.exit(sys.version_info < (3, 10) or not u.find_spec("aligner"))'
candidates=("${ALIGNER_VENV:-none}" "${VIRTUAL_ENV:-none}" "${CONDA_PREFIX:-none}" "$home/.venv" python3 python3.{13,12,11,10})
if [ -n "${ALIGNER_PYTHON:-}" ]; then candidates=("$ALIGNER_PYTHON"); fi
for python in "${candidates[@]}"; do
    if [ -d "$python" ]; then python="$python/bin/python"; fi
    if "$python" -c "$fits" 2> /dev/null; then break; else python=""; fi
done
if [ -z "$python" ]; then
    found="${ALIGNER_PYTHON:-python3} is $("${ALIGNER_PYTHON:-python3}" --version 2>&1)"
    echo "error: no Python 3.10 or newer with aligner on $(hostname) ($found): set ALIGNER_PYTHON to one, or load a module in slurm.setup"
    exit 2
fi
"""


def render(
    config: str, spec: JobSpec, *, title: str, overrides: Sequence[str] = (), path: str = "", variables: Mapping[str, str] | None = None
) -> str:
    """The script of a config with `overrides`; `path` is where it is kept (empty: nowhere). `variables` have these values unless the
    submitter sets others: at sites that export nothing (`--export=NONE`) nobody could set them."""
    made = f"aligner launch slurm {shlex.join([config, *overrides])}" + (f" --output {path}" if path else "")
    lines = ["#!/bin/bash", f"# {title}", f"# Made by `{made}`: the numbers are those of the config {config}."]
    if path:
        lines += ["#", f"#     sbatch {path} [key=value ...]", "#"]
        lines += ["# from the checkout, or where aligner is installed. The same line again resumes the run: docs/slurm.md"]
    slurm = spec.slurm
    lines += [
        f"#SBATCH --job-name={spec.name}",
        *([f"#SBATCH --time={slurm.time_limit}"] if slurm.time_limit else []),
        f"#SBATCH --signal=B:USR1@{slurm.signal_seconds_before_end}",
        f"#SBATCH --output={slurm.output}",
        "#SBATCH --no-requeue",
    ]
    for index, part in enumerate(spec.parts()[:1] if spec.is_separate else spec.parts()):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"# {one.name}: {one.num_ranks} {'rank' if one.num_ranks == 1 else 'ranks'}" for one in part]
        size, *others = part_options(part, spec.slurm)
        lines += [f"#SBATCH {' '.join(size)}", *(f"#SBATCH {' '.join(option)}" for option in others)]
    settings = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    given = '"$@"' if spec.is_separate else '-- "$@"'  # in separate jobs, which part it is comes first
    command = f'exec "$python" -m aligner.cluster.slurm --script "$0" --config {config}{settings} {given}'
    setup = f"\n# slurm.setup\n{slurm.setup.strip()}\n" if slurm.setup else ""
    chosen = "".join(f'export {name}="${{{name}:-{_quoted(value)}}}"\n' for name, value in (variables or {}).items())
    return "\n".join(lines) + "\n" + setup + (f"\n{chosen}" if chosen else "") + _BODY + command + "\n"


def part_options(part: Sequence[ComponentSpec], slurm: SlurmConfig) -> list[list[str]]:
    """What sbatch is asked for components that share nodes, or for one: the size, and every other option by itself."""
    gpus = max(component.gpus_per_node for component in part)
    size = [f"--nodes={max(component.num_nodes for component in part)}"]
    ranks = [component.ranks_per_node for component in part]  # side by side, or one component after the other
    size += [f"--ntasks-per-node={sum(ranks) if any(component.gpus for component in part) else max(ranks)}"]
    size += slurm.gpu_options(gpus)
    size += [f"--cpus-per-task={slurm.cpus_per_rank}"] if slurm.cpus_per_rank else []
    memory = slurm.memory if slurm.memory != "auto" else "0" * (slurm.exclusive and gpus > 0)
    size += [f"--mem={memory}"] if memory else []
    size += ["--exclusive"] if slurm.exclusive else []
    where = {"--partition": slurm.partition, "--account": slurm.account, "--qos": slurm.qos, "--constraint": slurm.constraint}
    given = [f"{option}={value}" for option, value in where.items() if value]
    return [size, *([option] for option in (*given, *slurm.options))]


def _quoted(value: str) -> str:
    """As it stands between double quotes in bash."""
    return re.sub(r'(["\\$`}])', r"\\\1", value)
