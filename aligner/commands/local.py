"""A run with several components on this machine: the processes of its config, under the local launcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.algorithms.registry import composed
from aligner.cluster.component import Component, check_installed, interpreter
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
from aligner.commands.programs import Program, placement_of, programs, share_out
from aligner.parallel import platform
from aligner.run.from_hub import fetch_named
from aligner.version import __version__


def launch_local(name: str, overrides: Sequence[str], *, num_processes: int = 0) -> int:
    """Start every component of a run with the same settings; returns the exit code.

    `name` is a config; `num_processes` overrides the config's number of actor processes. On a machine with GPUs each component sees its own
    only. Raises ConfigError before anything starts.
    """
    config = composed(name, overrides)
    found = programs(name, config, overrides, num_processes=num_processes)
    config.check_complete()
    fetch_named(config, records=True)  # before the components wait for each other
    devices = platform.visible_devices()
    own = share_out(found, placement_of(config), len(devices)) if devices else {}
    components = [
        Component(
            name=program.component,
            command=(_python(program), "-u", *program.arguments),
            num_processes=program.num_ranks,
            env={"CUDA_VISIBLE_DEVICES": ",".join(devices[number] for number in own[program.component])} if devices else {},
            main=index == 0,
            terminal=index == 0,
        )
        for index, program in enumerate(found)
    ]
    servers = [component.name for component in components if not component.main]
    launcher = getattr(config, "local_launcher", None)
    return launch(components, run_directory=RunDirectory(Path(config.run.directory)).create(), config=launcher, expect_services=servers)


def _python(program: Program) -> str:
    """The component's interpreter. Raises ConfigError for an environment without one, or without this version of this package."""
    python = interpreter(program.component, program.environment)
    if program.environment:
        check_installed(program.component, python, __version__)
    return python
