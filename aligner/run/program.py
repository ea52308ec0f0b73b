"""Programs whose command line is settings: what they do for it, and the exit code and outcome that they report.

`--multirun` is one run for each combination of settings, chosen by a sweeper and started by a launcher of Hydra or of a plugin.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from aligner.cluster import outcomes, processes
from aligner.cluster.outcomes import ExitCode, exit_code_of
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.reporting.formats import Column, number
from aligner.reporting.run_view import RunView
from aligner.run.from_hub import fetch_named
from aligner.settings.command_line import CommandLine, override, read
from aligner.settings.compose import (
    ENTRY,
    ERRORS,
    compose,
    compose_node,
    composing,
    explain,
    own_folders,
    parsed,
    shown_values,
    to_object,
    to_yaml,
)
from aligner.settings.explain import find_file, folders_of, groups_of, hint, render
from aligner.settings.schema import SchemaKey, schema_keys
from aligner.telemetry import terminal

T = TypeVar("T")


def entrypoint(
    schema: type[T], name: str, folders: Sequence[Path] | None = None, columns: Sequence[Column] = ()
) -> Callable[[Callable[[T], int | None]], Callable[..., None]]:
    """Decorator that turns `main(config)` into a program: `main()` reads sys.argv, composes `<name>.yaml` of the folders and calls it.

    `--config-name ppo_70b`, or `config=ppo_70b`, chooses another config of the recipe; `--config-dir DIR` adds a folder of the user's.
    `--help` prints the most important settings with value and meaning, `--help SECTION` and `--help all` others
    (`aligner.settings.explain`); `--cfg job` prints the resolved YAML (??? for required settings without a value). `--multirun` runs every
    combination of `key=a,b`, or what another of Hydra's sweepers asks for, each as a run of its own, and shows the `columns` of all.

    The program ends with the exit code that `main` returns (None: 0); nothing else gives exit code 0. An AlignerError ends it with one line
    on stderr (ALIGNER_TRACEBACK=1 adds the traceback) and the code of `aligner.cluster.outcomes`: 2 for ConfigError and DataError, 78 for
    RunHalted, 1 for the others. Any other exception is a bug and keeps its traceback and exit code 1.
    """
    places = folders or folders_of(name)

    def do(command: CommandLine, program: str, main: Callable[[T], int | None]) -> int:
        """Do what the command line asks for; the exit code."""
        keys, overrides = schema_keys(schema), command.overrides
        refuse_options(command.unknown, keys)
        config = chosen_config(name, command, places)
        if command.asks == "--multirun":
            return sweep(schema, config, overrides, places, columns=columns)
        if not command.asks:
            settings = compose(schema, config, overrides, places)
            fetch_named(settings, records=True)
            return int(main(settings) or 0)
        show(command, program, schema, config, places)
        return 0

    def decorate(main: Callable[[T], int | None]) -> Callable[..., None]:
        def run(argv: Sequence[str] | CommandLine | None = None, program: str = "") -> None:
            terminal.guard()
            try:
                command = argv if isinstance(argv, CommandLine) else read(sys.argv[1:] if argv is None else argv)
                with outcomes.unless_ended_early(os.environ):
                    code = do(command, program or f"python {sys.argv[0]}", main)
            except AlignerError as error:
                if os.environ.get("ALIGNER_TRACEBACK") == "1":
                    traceback.print_exc()
                outcomes.fail(os.environ, exit_code_of(error), str(error))
                raise SystemExit(int(exit_code_of(error))) from error
            except BrokenPipeError:  # of `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = ExitCode.done
            except Exception as error:
                if isinstance(error, OSError) and is_storage_error(error):  # not a bug: a full disk, or a read-only one
                    message = f"rank {outcomes.rank_of(os.environ)}: {describe_os_error(error, 'a file of the run')}"
                    outcomes.fail(os.environ, ExitCode.failed, message)
                    raise SystemExit(int(ExitCode.failed)) from error
                outcomes.record(os.environ, ExitCode.failed, f"{type(error).__name__}: {error}")
                raise
            outcomes.record(os.environ, code)
            if code:
                raise SystemExit(code)

        return run

    return decorate


def show(command: CommandLine, program: str, schema: type, config: str, places: Sequence[Path]) -> None:
    """Print the help or the config that the command line asks for."""
    node = compose_node(schema, config, command.overrides, places)
    if command.asks == "--help":
        keys = schema_keys(schema, described=True)
        groups = groups_of(keys, [*places, *own_folders(command.overrides)])
        print(render(keys, dict(shown_values(node, keys)), program=program, file=config, groups=groups, topic=command.topic), flush=True)
    else:
        complete = not OmegaConf.missing_keys(node)
        print(to_yaml(to_object(schema, node)) if complete else OmegaConf.to_yaml(node, resolve=True), end="", flush=True)


def refuse_options(unknown: Sequence[str], keys: Sequence[SchemaKey]) -> None:
    """Raise ConfigError for options that do not exist, with the settings that they probably mean."""
    lines = []
    for typed in sorted(unknown):
        option, _, value = typed.partition("=")
        meant = hint(option.lstrip("-").replace("-", "_"), keys)
        meant = re.sub(r"(?<=did you mean )([\w.]+)\?", lambda found, value=value: f"{found[1]}={value}?", meant) if value else meant
        lines.append(f"unknown option {typed}; settings are written key=value; {meant}")
    if lines:
        raise ConfigError("\n  ".join(lines))


def chosen_config(name: str, command: CommandLine, folders: Sequence[Path]) -> str:
    """The config that the command line names. Raises ConfigError if the recipe `name` has no such config."""
    places = [folders[0], *own_folders(command.overrides)]
    if command.config and find_file(command.config, places) is None:
        own = ", ".join(sorted(file.stem for place in places for file in place.glob("*.yaml")))
        raise ConfigError(f"config={command.config}: this program is of {name}; allowed: {own}, or a file in --config-dir DIR")
    return command.config or name


_DEFAULTS = {  # used unless they are given
    "hydra.sweep.dir": "${run.directory}/sweep",
    "hydra.sweep.subdir": "${hydra.job.override_dirname}",  # the same command again resumes the same runs
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
    "hydra.output_subdir": "null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """One run of a sweep."""

    settings: str  # only those in which the runs differ
    directory: Path
    is_done: bool


def sweep(schema: type[T], config: str, overrides: Sequence[str], folders: Sequence[Path], *, columns: Sequence[Column] = ()) -> int:
    """Run all combinations and print a table; the exit code is 0 if all runs are done, else 1.

    Every run is `aligner launch local` in a directory of its own (in `hydra.sweep.dir`, by default `<run.directory>/sweep`), with the
    components and ranks of any run. A sweeper that searches for the best settings receives the newest `checkpoint.best_metric`.

    Raises ConfigError for settings that do not exist, before the first run starts.
    """
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise ConfigError("--multirun starts the ranks of every run itself: start it once, not on every rank")
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    own = [f"{key}={value}" for key, value in _DEFAULTS.items() if key not in given]
    try:
        with composing(schema, config, overrides, folders, sweeps=True) as settings:
            if swept := [one.input_line for one in settings.named if one.is_sweep_override()]:
                raise ConfigError(f"{swept[0]!r}: a setting of a dict of sections has one value in all runs of a sweep")
            typed = parsed([one for one in settings.plain if not one.startswith("hydra")])
            fixed = [one.get_key_element().lstrip("+~") for one in typed if not one.is_sweep_override()]
            named = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"
            task = _Task(config=config, more=(*(one.input_line for one in settings.named), settings.searchpath), fixed=tuple(fixed))
            returned = GlobalHydra.instance().hydra.multirun(
                config_name=ENTRY,
                task_function=task,
                overrides=[*settings.plain, settings.searchpath, named, *own],
                with_log_configuration=False,
            )
    except ERRORS as error:
        raise explain(error, folders) from error
    ended = [_ended(one, fixed) for batch in returned or [] for one in batch] if isinstance(returned, list) else []
    _show(ended, columns)
    return ExitCode.done if all(one.is_done for one in ended) else ExitCode.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """Called by Hydra for every run; a plugin's launcher may send it to another machine."""

    config: str
    more: tuple[str, ...]
    fixed: tuple[str, ...]

    def __call__(self, config: DictConfig) -> float | None:
        job = HydraConfig.get()
        directory, overrides = Path(job.runtime.output_dir), list(job.overrides.task)
        print(f"\n=== run {job.job.num}: {_own(overrides, self.fixed) or self.config}", flush=True)
        program = ["-m", "aligner.cli", "launch", "local", self.config, *overrides, *self.more, override("run.directory", directory)]
        with subprocess.Popen(processes.exec_command([sys.executable, "-u", *program])) as run:
            try:
                run.wait()
            except KeyboardInterrupt:  # it also reaches the run, which saves and ends; so does any end of this process
                run.wait()
                raise
        if not RunDirectory(directory).done.is_file():  # at once: not every sweeper reports its runs at the end
            print(f"run {job.job.num} did not finish; its logs: {RunDirectory(directory).logs}", file=sys.stderr, flush=True)
        metric = OmegaConf.select(config, "checkpoint.best_metric", default="")
        return RunView(directory).newest(metric) if metric else None


def _own(overrides: Sequence[str], fixed: Sequence[str]) -> str:
    return ",".join(one for one in overrides if one.partition("=")[0].lstrip("+~") not in fixed)


def _ended(returned: JobReturn, fixed: Sequence[str]) -> Ended:
    directory = Path(returned.hydra_cfg.hydra.runtime.output_dir)  # type: ignore[union-attr]
    return Ended(settings=_own(list(returned.overrides or ()), fixed), directory=directory, is_done=RunDirectory(directory).done.is_file())


def _show(ended: Sequence[Ended], columns: Sequence[Column]) -> None:
    """A table of the runs, with the newest value of every metric that any of them has."""
    newest = [{column.label: RunView(one.directory).newest(column.metric) for column in columns} for one in ended]
    shown = [column for column in columns if any(values[column.label] is not None for values in newest)]
    table = Table("settings", *(column.label for column in shown), "", "", box=None)
    for one, values in zip(ended, newest, strict=True):
        cells = ["" if (value := values[column.label]) is None else number(value, column.format) for column in shown]
        table.add_row(
            one.settings, *cells, "done" if one.is_done else "not done", "" if one.directory.name == one.settings else one.directory.name
        )
    print()
    Console(soft_wrap=True).print(table)
    print(*dict.fromkeys(f"in {one.directory.parent}" for one in ended), sep="\n")
