"""What the conductor has to run: made from the resolved config at the job's start, kept as JSON in `<run>/jobs/<job id>/spec.json`.

The conductor runs on the batch host, outside the components' container, with nothing but Python: so it is told everything in plain values.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from aligner.cluster.slurm.config import OnFailure, SlurmConfig
from aligner.errors import LaunchError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSpec:
    """One SPMD component: its place in the heterogeneous job is its place in `JobSpec.components`."""

    name: str
    program: tuple[str, ...]  # arguments of the Python interpreter
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0: none are asked for

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A run. The first component is the one that trains (the actor); the others are servers and end with it."""

    name: str
    run_directory: str
    max_steps: int
    checkpoints: tuple[str, ...]  # folders below <run>/checkpoints; a step counts where all of them have it
    components: tuple[ComponentSpec, ...]
    preflight: tuple[str, ...]  # arguments of the Python interpreter; empty: none
    slurm: SlurmConfig


def to_json(spec: JobSpec) -> str:
    """The spec as text; `from_json` reads it back."""
    return json.dumps({"format": _FORMAT, **asdict(spec)}, indent=1) + "\n"


def from_json(text: str) -> JobSpec:
    """Raises LaunchError for a spec of another version."""
    try:
        record = json.loads(text)
        if record.pop("format") != _FORMAT:
            raise LaunchError("the job's spec is of another version of this program: conductor and container must hold the same one")
        components = tuple(ComponentSpec(**{**one, "program": tuple(one["program"])}) for one in record.pop("components"))
        slurm = _slurm(record.pop("slurm"))
        tuples = {name: tuple(record.pop(name)) for name in ("checkpoints", "preflight")}
        return JobSpec(components=components, slurm=slurm, **tuples, **record)
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"the job's spec cannot be read ({error}): conductor and container must hold the same version") from error


def read_spec(path: Path) -> JobSpec:
    """Raises LaunchError where the file is missing or of another version."""
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read the job's spec: {error}") from error


def _slurm(record: dict[str, Any]) -> SlurmConfig:
    enums = {field.name for field in fields(SlurmConfig) if field.name.startswith("on_")}
    return SlurmConfig(**{name: OnFailure(value) if name in enums else value for name, value in record.items()})
