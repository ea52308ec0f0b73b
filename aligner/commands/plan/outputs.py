"""What `aligner plan` writes and compares besides its tables, and plans of runs that have begun: `--html`, `--trace`, `--against`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aligner.algorithms.registry import composed, recipes
from aligner.cluster.run_directory import RunDirectory
from aligner.commands import against as comparison
from aligner.commands.plan.page import report_html
from aligner.errors import AlignerError, ConfigError, describe_os_error
from aligner.files import publish
from aligner.planner import report
from aligner.run.settings import JobRun
from aligner.settings.compose import from_yaml, schema_of
from aligner.telemetry.spans import chrome_trace

LENGTHS = ("plan.response_length=", "plan.prompt_length=", "plan.example_length=", "plan.lengths_of=")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """`html` and `trace` are files to write; `against` is the directory of a run to compare with."""

    html: Path | None = None
    trace: Path | None = None
    against: Path | None = None

    def write(self, job: report.JobPlan) -> None:
        """Write and print what was asked for. Raises AlignerError if a file cannot be written, DataError for a run without two steps."""
        if self.html is not None or self.trace is not None:
            spans = job.run.spans
            _publish(self.html, lambda: report_html(job, spans))
            _publish(self.trace, lambda: chrome_trace(spans))
        if self.against is not None:
            comparison.show(comparison.compare(job, self.against), report.console())


def _publish(path: Path | None, text: Any) -> None:
    if path is None:
        return
    try:
        publish(path, lambda new: new.write_text(text(), encoding="utf-8"))
    except OSError as error:
        raise AlignerError(f"the plan could not be written: {describe_os_error(error, path)}") from error
    print(f"written to {path}")


def config_and_overrides(config: str, overrides: Sequence[str], against: Path | None) -> tuple[str, tuple[str, ...]]:
    """The config to plan and its overrides: without a config that of the run to compare with. Responses are as long as the run's were
    unless the overrides say otherwise. Raises ConfigError without either."""
    if "=" in config and not Path(config).exists():  # the first setting: no config was named
        config, overrides = "", (config, *overrides)
    if not config and against is None:
        raise ConfigError("aligner plan: name a config, such as ppo_70b, or the directory of a run, or one with --against")
    if against is not None and not any(one.startswith(LENGTHS) for one in overrides):
        overrides = (*comparison.lengths(against), *overrides)
    return config or str(against), tuple(overrides)


def is_run(name: str) -> bool:
    """Whether this is the directory of a run that has begun."""
    return RunDirectory(Path(name)).config.is_file()


def of_run(name: str, overrides: Sequence[str]) -> JobRun:
    """The config that a run has recorded, with `overrides`; `cluster=NAME` takes another machine in place of the recorded one.

    Raises ConfigError for settings that there are not.
    """
    text = RunDirectory(Path(name)).config.read_text()
    schema = schema_of([recipe.config for recipe in recipes().values()], text)
    about_cluster = [one for one in overrides if one.startswith(("cluster=", "hydra.searchpath="))]
    config: JobRun = from_yaml(schema, text, [one for one in overrides if one not in about_cluster])
    if not any(one.startswith("cluster=") for one in about_cluster):
        return config
    recipe = next(recipe.name for recipe in recipes().values() if recipe.config is schema)
    machine = composed(recipe, ["data.train=not-read", *(one for one in overrides if one.startswith(("cluster", "hydra.searchpath=")))])
    return replace(config, cluster=machine.cluster)
