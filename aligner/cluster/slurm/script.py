"""The batch script of a job: `#SBATCH` lines from the job's spec, and a body that is the same for every job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, SlurmConfig

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
    """The script of a config with `overrides`. `title` describes it; `path` is where it is kept (empty: nowhere).

    `variables` have these values unless the submitter sets others: at sites that export nothing (`--export=NONE`) nobody could set them.
    """
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
