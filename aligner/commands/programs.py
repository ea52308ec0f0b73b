"""The programs of a run, one per component, all with the same settings; and a run's start on this machine, under the local launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from aligner.algorithms.registry import composed, recipe_of
from aligner.cluster.component import Component, Placement, check_installed, interpreter
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ConfigError
from aligner.parallel import platform
from aligner.run.from_hub import fetch_named
from aligner.run.settings import JobRun
from aligner.servers.components import in_section
from aligner.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One component: the arguments of the Python interpreter, on `num_ranks` ranks."""

    component: str
    arguments: tuple[str, ...]
    num_ranks: int
    num_gpus: int  # that it computes on; a served function needs none
    environment: str = ""  # the virtual environment that it runs in; empty: the launcher's


def programs(name: str, config: JobRun, overrides: Sequence[str], *, num_processes: int = 0) -> list[Program]:
    """The programs of a run, the one that trains first; the others are its servers. `num_processes` overrides the config's."""
    num_ranks = num_processes or config.num_processes
    overrides = [*overrides, *([f"num_processes={num_processes}"] if num_processes else [])]
    config.parallel.check_world(num_ranks)
    has_servers = config.traits().role == "actor"

    def program(component: str, arguments: Sequence[str], num_ranks: int, *, computes: bool = True) -> Program:
        section = getattr(config, component, None) if has_servers else None
        return Program(
            component=component,
            arguments=("-m", "aligner.cli", *arguments),
            num_ranks=num_ranks,
            num_gpus=-(-num_ranks // config.run.ranks_per_gpu) if computes else 0,
            environment="" if section is None else section.environment,
        )

    found = [program("actor" if has_servers else recipe_of(name, overrides).name, ("train", name, *overrides), num_ranks)]
    for server in config.servers():
        with in_section(server.name):
            server.parallel.check_world(server.num_ranks)
        arguments = ("serve", server.name, name, *overrides)
        found.append(program(server.name, arguments, server.num_ranks, computes=server.work is not None))
    return found


def share_out(found: Sequence[Program], placement: Placement, num_gpus: int) -> dict[str, range]:
    """The GPUs of a machine by component: each has its own, the one that trains the first; colocated ones all begin there. Raises
    ConfigError if there are too few."""
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
            f"{setting}this run needs {needed} GPUs ({parts}), and this machine shows {num_gpus}; allowed: at most "
            f"{num_gpus} with {counts}{others}"
        )
    return own


def launch_local(name: str, overrides: Sequence[str], *, num_processes: int = 0) -> int:
    """Start every component of a run with the same settings; returns the exit code. `num_processes` overrides the config's. On a machine
    with GPUs each component sees its own only."""
    config = composed(name, overrides)
    found = programs(name, config, overrides, num_processes=num_processes)
    config.check_complete()
    fetch_named(config, records=True)  # before the components wait for each other
    devices = platform.visible_devices()
    own = share_out(found, config.server_placement, len(devices)) if devices else {}
    components = []
    for index, program in enumerate(found):
        python = interpreter(program.component, program.environment)
        if program.environment:
            check_installed(program.component, python, __version__)
        components.append(
            Component(
                name=program.component,
                command=(python, "-u", *program.arguments),
                num_processes=program.num_ranks,
                env={"CUDA_VISIBLE_DEVICES": ",".join(devices[number] for number in own[program.component])} if devices else {},
                main=index == 0,
                terminal=index == 0,
            )
        )
    servers = [component.name for component in components if not component.main]
    launcher = getattr(config, "local_launcher", None)
    return launch(components, run_directory=RunDirectory(Path(config.run.directory)).create(), config=launcher, expect_services=servers)
