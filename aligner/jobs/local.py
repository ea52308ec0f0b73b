"""A run with several components on this machine: the processes that its config asks for, under the local launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from aligner.cluster.component import Component
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
from aligner.config import compose
from aligner.jobs.programs import RECIPES, SCRIPTS, programs, recipe_of
from aligner.schemas import OnlineRun

__all__ = ["RECIPES", "SCRIPTS", "launch_local", "recipe_of"]


def launch_local(name: str, overrides: Sequence[str], *, num_processes: int = 0) -> int:
    """Start every component of a run with the same settings; returns the exit code.

    `name` is a file stem in conf/; `num_processes` overrides the config's number of actor processes. Raises ConfigError before anything
    starts.
    """
    config = compose(RECIPES[recipe_of(name)][0], name, overrides)
    found = programs(name, config, overrides, num_processes=num_processes)
    if isinstance(config, OnlineRun):
        config.check_rewarded()
    components = [
        Component(
            name=program.component,
            command=(sys.executable, "-u", str(program.script), *program.arguments),
            num_processes=program.num_ranks,
            main=index == 0,
            terminal=index == 0,
        )
        for index, program in enumerate(found)
    ]
    servers = [component.name for component in components if not component.main]
    launcher = config.launcher if isinstance(config, OnlineRun) else None
    return launch(components, run_directory=RunDirectory(Path(config.run.directory)).create(), config=launcher, expect_services=servers)
