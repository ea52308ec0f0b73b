"""Which programs a run consists of: one for each component, all with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.algorithms.registry import recipe_of
from aligner.loop.config import JobRun
from aligner.servers.components import in_section

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "nlp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One component: a script of examples/nlp with its arguments, on `num_ranks` ranks."""

    component: str
    script: Path
    arguments: tuple[str, ...]
    num_ranks: int


def programs(name: str, config: JobRun, overrides: Sequence[str], *, num_processes: int = 0) -> list[Program]:
    """The programs of a run, the one that trains first; the others are its servers.

    `config` is what `conf/<name>.yaml` and `overrides` give; `num_processes` overrides its number of actor processes. Raises ConfigError
    where a layout does not fit its ranks.
    """
    recipe = recipe_of(name)
    overrides = (f"config={name}", *overrides)
    num_ranks = num_processes or config.num_processes
    config.parallel.check_world(num_ranks)
    role = config.traits().role
    found = [_program("actor" if role == "actor" else recipe.name, recipe.script, overrides, num_ranks)]
    for server in config.servers():
        with in_section(server.name):
            server.parallel.check_world(server.num_ranks)
        found.append(_program(server.name, server.script, (f"recipe={recipe.name}", *overrides), server.num_ranks))
    return found


def _program(component: str, script: str, arguments: Sequence[str], num_ranks: int) -> Program:
    return Program(component=component, script=SCRIPTS / script, arguments=tuple(arguments), num_ranks=num_ranks)
