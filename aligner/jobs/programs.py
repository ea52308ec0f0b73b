"""The programs of a run: one per component, all with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aligner.algorithms.registry import recipe_of
from aligner.loop.config import JobRun
from aligner.servers.components import in_section


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One component: the arguments of the Python interpreter, on `num_ranks` ranks."""

    component: str
    arguments: tuple[str, ...]
    num_ranks: int
    environment: str = ""  # the virtual environment that it runs in; empty: the launcher's


def programs(name: str, config: JobRun, overrides: Sequence[str], *, num_processes: int = 0) -> list[Program]:
    """The programs of a run, the one that trains first; the others are its servers.

    `config` results from `name` and `overrides`; `num_processes` overrides its number of actor processes. Raises ConfigError
    where a layout does not fit its ranks.
    """
    recipe = recipe_of(name, overrides)
    num_ranks = num_processes or config.num_processes
    config.parallel.check_world(num_ranks)
    role = config.traits().role
    found = [_program("actor" if role == "actor" else recipe.name, ("train", name, *overrides), num_ranks)]
    for server in config.servers():
        with in_section(server.name):
            server.parallel.check_world(server.num_ranks)
        found.append(_program(server.name, ("serve", server.name, name, *overrides), server.num_ranks))
    return [replace(program, environment=_environment(config, program.component)) for program in found]


def _environment(config: JobRun, component: str) -> str:
    """The component's setting; recipes without servers have none."""
    section = getattr(config, component, None) if config.traits().role == "actor" else None
    return "" if section is None else section.environment


def _program(component: str, arguments: Sequence[str], num_ranks: int) -> Program:
    return Program(component=component, arguments=("-m", "aligner.cli", *arguments), num_ranks=num_ranks)
