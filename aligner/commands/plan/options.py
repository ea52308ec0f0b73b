"""`aligner plan` and `aligner trace`: what a run will do when, and what it did when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aligner.commands.parts import (
    CONFIG,
    DIRECTORY,
    FILE,
    RUN_DIRECTORY,
    SETTINGS,
    Command,
    config_dir,
    config_names,
    json_option,
    overrides_argument,
    run_directory,
)

if TYPE_CHECKING:
    from pathlib import Path


@click.command(cls=Command, epilog=f"{CONFIG[:-1]}, or the directory of a run. {SETTINGS}")
@click.argument("config", required=False, default="", shell_complete=config_names)
@overrides_argument
@config_dir
@click.option("--search", is_flag=True, help="Find the fastest layouts, placement and shares of the GPUs instead; what is typed stays.")
@click.option("--gpus", default=0, metavar="N", help="Search on at most so many (default: the config's).")
@click.option("--steps", type=click.IntRange(min=0), default=0, metavar="N", help="With --search: of training, that hours are counted for.")
@click.option("--deadline", default="", metavar="TIME", help="Search the fewest GPUs that make the steps in 24h, 2d, 90m.")
@click.option("--write", type=DIRECTORY, metavar="DIR", help="With --search: write the best one there, as a config and a Slurm script.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="With --search: rows of a table.")
@click.option("--against", type=DIRECTORY, metavar="RUN", help="Compare with what this run measured (without CONFIG: its own config).")
@click.option("--html", type=FILE, metavar="FILE", help="Write memory by phase and the timeline of a step as one page.")
@click.option("--trace", type=FILE, metavar="FILE", help="Write a step as a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--explain", is_flag=True, help="Also say what takes the time of a step, and what would shorten it by how much.")
@click.option("--calibrate", type=FILE, metavar="FILE", help="Instead fit the cluster's parameters to the measured jobs of FILE.")
@json_option
def plan(config: str, overrides: tuple[str, ...], calibrate: Path | None, json_path: Path | None, **options: Any) -> int:
    """Memory and time of a job, before it is submitted; exit code 1 if it does not fit."""
    from aligner.commands.plan.command import plan
    from aligner.commands.plan.outputs import Outputs, config_and_overrides
    from aligner.commands.plan.search import Request, search

    if calibrate is not None:
        from aligner.commands.calibrate import fit

        return fit(calibrate)
    chosen = Outputs(**{name: options.pop(name) for name in ("against", "html", "trace")})
    config, overrides = config_and_overrides(config, overrides, chosen.against)
    explains, searches = options.pop("explain"), options.pop("search")
    request = Request(**options, json_path=json_path)
    if searches or request.gpus or request.deadline:
        return search(config, overrides, request, chosen)
    request.check_unused()
    return plan(config, overrides, explains=explains, json_path=json_path, outputs=chosen)


@click.command(cls=Command, epilog=RUN_DIRECTORY)
@run_directory
@click.option("--output", type=FILE, metavar="FILE", help="The trace (default: RUN_DIRECTORY/trace.json).")
@click.option("--steps", type=click.IntRange(min=0), default=0, metavar="N", help="Only the last N training steps (default: all recorded).")
def trace(directory: Path, output: Path | None, steps: int) -> int:
    """What every process of a run did when, as one trace for ui.perfetto.dev or chrome://tracing."""
    from aligner.commands.trace import trace

    return trace(directory, output, steps=steps)


COMMANDS = (plan, trace)
