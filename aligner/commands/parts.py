"""Parts of the commands of `aligner`: their class, shared arguments, and options that are declared as the fields of a dataclass.

It imports click only, so that `aligner --help` and completion in a shell answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import click

from aligner.settings.command_line import override


class Command(click.Command):
    """A command that `main` runs after click has returned: click would turn Ctrl-C and broken pipes into errors of its own."""

    def invoke(self, ctx: click.Context) -> Callable[[], int]:
        if (folder := ctx.params.pop("config_dir", None)) is not None:  # as an override it reaches every process of the run
            ctx.params["overrides"] = (*ctx.params["overrides"], override("hydra.searchpath", [f"file://{folder.resolve()}"]))
        return partial(self.callback, **ctx.params)

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(limit=200)  # whole sentences in the list of commands


def config_names(context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[str]:
    """Config names with this prefix, for completion in a shell."""
    from aligner.files import configs

    return [name for name in configs() if name.startswith(incomplete)]


def configs_or(kind: str, context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[Any]:
    """`config_names`, and paths, which the shell completes itself (`kind`: file, dir)."""
    from click.shell_completion import CompletionItem

    found = [CompletionItem(name) for name in config_names(context, parameter, incomplete)]
    return [CompletionItem(incomplete, type=kind), *found]


class PathType(click.Path):
    """A path, which need not exist yet."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(super().convert(value, param, ctx))


class Amount(click.FloatRange):
    """A finite number that is not negative; click itself lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


AMOUNT = Amount(min=0)
FILE = PathType(readable=False)
DIRECTORY = PathType(readable=False, file_okay=False)
CONFIG = "CONFIG: a recipe, such as ppo, or one of its configs in conf/ppo/, such as ppo_70b."
SETTINGS = "KEY=VALUE: settings, as for `aligner train`."
config_argument = click.argument("config", shell_complete=config_names)
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
config_dir = click.option("--config-dir", type=DIRECTORY, metavar="DIR", help="Directory of your own configs and presets.")
json_option = click.option("--json", "json_path", type=FILE, metavar="FILE", help="Write all results to FILE as JSON.")
run_directory = click.argument("directory", type=DIRECTORY, metavar="RUN_DIRECTORY")
RUN_DIRECTORY = "RUN_DIRECTORY: run.directory of the run, which may still be running."


def option(default: Any, name: str, metavar: str = "", help: str = "", **settings: Any) -> Any:
    """A field of a dataclass that is an option of a command; `settings` are click's."""
    return field(default=default, metadata={"name": name, "metavar": metavar or None, "help": help, **settings})


def options_of(kind: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator that adds the fields of a dataclass as options to a command, which is called with `options`, an object of that class."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        def command(**given: Any) -> int:
            options = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
            return function(**given, options=options)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
        for one in reversed(fields(kind)):
            settings = dict(one.metadata)
            is_flag = one.default is False
            click.option(settings.pop("name"), one.name, default=one.default, is_flag=is_flag, **settings)(command)
        return command

    return decorate


json_field = partial(option, None, "--json", "FILE", "Write all results to FILE as JSON.", type=FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightOptions:
    only: str = option("", "--only", "A,B", "Run only these checks (ranks, config and hub always run).")
    engine: bool = option(False, "--engine", help="Also build the model and its rollout engine, refit it and generate.")
    timeout: float = option(0.0, "--timeout", "SECONDS", "Timeout per check, overriding each check's default.", type=AMOUNT)
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class GapOptions:
    num_prompts: int = option(16, "--prompts", "N", "Number of prompts from data.train.", type=click.IntRange(min=1), show_default=True)
    random_prompts: bool = option(False, "--random-prompts", help="Use prompts of random tokens instead of data.train.")
    num_tokens: int = option(32, "--tokens", "N", "Maximum tokens per response.", type=click.IntRange(min=1), show_default=True)
    num_traced: int = option(
        4, "--traced", "N", "Number of responses whose layers are compared, worst first.", type=click.IntRange(min=1), show_default=True
    )
    greedy: bool = option(False, "--greedy", help="Sample greedily (log-probs at temperature 1).")
    ulps: float = option(0.0, "--ulps", "X", "Tolerance of an operation (default: 128 float32, else 16).", type=AMOUNT)
    gap: float = option(
        0.0,
        "--gap",
        "NATS",
        "Tolerance of the mean gap (default: 1e-4 float32, 0.05 bfloat16, 0.01 float16).",
        type=AMOUNT,
    )
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    kind: str = option("", "--kind", "KIND", "Dataset type of a file: sft, preference, kto, ... (docs/data.md; `inspect` detects it).")
    tokenizer: str = option("", "--tokenizer", "DIR", "Directory of the model's tokenizer, for a file.", type=click.Path())
    num_samples: int = option(3, "--samples", "N", "Number of samples to show.", type=click.IntRange(min=0), show_default=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOptions(InspectOptions):
    lists_all: bool = option(False, "--all", help="List every problem, not the first few of each kind.")
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    dry_run: bool = option(False, "--dry-run", help="Print the script instead of submitting it.")
    test_only: bool = option(False, "--test-only", help="Ask Slurm whether and when it could run (sbatch --test-only).")
    output: Path | None = option(None, "--output", "FILE", "Write the script to FILE instead of submitting it.", type=FILE)
    separate: bool = option(
        False, "--separate", help="Submit one job per component, for sites without heterogeneous jobs (slurm.separate=true)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrateOptions:
    framework: str = option("", "--from", "NAME", "Framework of the input, such as trl, if it is not recognised.")
    trains: str = option("", "--trains", "NAME", "What the input trains, such as dpo, if its keys do not show it.")
    ranks: int = option(0, "--ranks", "N", "Number of training GPUs, if batch sizes are per device.", type=click.IntRange(min=0))
    examples: int = option(
        0, "--examples", "N", "Number of training examples, used to convert epochs to steps.", type=click.IntRange(min=0)
    )
    output: Path | None = option(None, "--output", "FILE", "Write the config (.yaml) or the command (.sh) to FILE.", type=FILE)
    json_path: Path | None = json_field()
