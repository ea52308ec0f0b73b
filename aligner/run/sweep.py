"""`--multirun`: one run for each combination of settings, chosen by a sweeper and started by a launcher of Hydra or of a plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from aligner.cluster import processes
from aligner.cluster.exit_codes import ExitCode
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ConfigError
from aligner.reporting.formats import Column, number
from aligner.reporting.run_view import RunView
from aligner.settings.command_line import override
from aligner.settings.compose import ENTRY, ERRORS, composing, explain, parsed

T = TypeVar("T")
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
