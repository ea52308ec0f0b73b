"""The programs of a run: one per component, all with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from aligner.algorithms.registry import recipe_of
from aligner.cluster.config import Placement
from aligner.errors import ConfigError
from aligner.run.settings import JobRun
from aligner.servers.components import in_section


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One component: the arguments of the Python interpreter, on `num_ranks` ranks."""

    component: str
    arguments: tuple[str, ...]
    num_ranks: int
    num_gpus: int  # that it computes on; a served function needs none
    environment: str = ""  # the virtual environment that it runs in; empty: the launcher's


def programs(name: str, config: JobRun, overrides: Sequence[str], *, num_processes: int = 0) -> list[Program]:
    """The programs of a run, the one that trains first; the others are its servers.

    `config` results from `name` and `overrides`; `num_processes` overrides its number of actor processes. Raises ConfigError
    where a layout does not fit its ranks.
    """
    recipe = recipe_of(name, overrides)
    num_ranks = num_processes or config.num_processes
    overrides = [*overrides, *([f"num_processes={num_processes}"] if num_processes else [])]
    config.parallel.check_world(num_ranks)
    role = config.traits().role
    shared = config.run.ranks_per_gpu
    found = [_program("actor" if role == "actor" else recipe.name, ("train", name, *overrides), num_ranks, -(-num_ranks // shared))]
    for server in config.servers():
        with in_section(server.name):
            server.parallel.check_world(server.num_ranks)
        num_gpus = 0 if server.work is None else -(-server.num_ranks // shared)
        found.append(_program(server.name, ("serve", server.name, name, *overrides), server.num_ranks, num_gpus))
    return [replace(program, environment=_environment(config, program.component)) for program in found]


def _environment(config: JobRun, component: str) -> str:
    """The component's setting; recipes without servers have none."""
    section = getattr(config, component, None) if config.traits().role == "actor" else None
    return "" if section is None else section.environment


def _program(component: str, arguments: Sequence[str], num_ranks: int, num_gpus: int) -> Program:
    return Program(component=component, arguments=("-m", "aligner.cli", *arguments), num_ranks=num_ranks, num_gpus=num_gpus)


def placement_of(config: JobRun) -> Placement:
    """Recipes without servers have nothing to place."""
    return config.server_placement


def share_out(found: Sequence[Program], placement: Placement, num_gpus: int) -> dict[str, range]:
    """The GPUs of a machine of `num_gpus` by component: each has its own, the one that trains the first; colocated ones all begin there.

    Raises ConfigError where there are too few.
    """
    if placement is Placement.colocated:
        own = {program.component: range(program.num_gpus) for program in found}
        needed = max(map(len, own.values()))
    else:
        ends = list(accumulate(program.num_gpus for program in found))
        own = {program.component: range(end - program.num_gpus, end) for program, end in zip(found, ends, strict=True)}
        needed = ends[-1]
    if needed > num_gpus:
        parts = ", ".join(f"{program.component} {program.num_gpus}" for program in found)
        counts = ", ".join("num_processes" if index == 0 else f"{program.component}.num_processes" for index, program in enumerate(found))
        setting = f"placement={placement.value}: " if len(found) > 1 else ""
        others = ", or placement=colocated" if setting and placement is Placement.separate else ""
        raise ConfigError(
            f"{setting}this run needs {needed} GPUs ({parts}), and this machine shows {num_gpus}; allowed: at most so "
            f"many with {counts}{others}"
        )
    return own
