"""What the commands of `aligner` are made of: their class, and the arguments and options that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path


class Command(click.Command):
    """Chosen here, run by `main`: around a command that runs, click would turn Ctrl-C and broken pipes into errors of its own."""

    def invoke(self, ctx: click.Context) -> Callable[[], int]:
        if (folder := ctx.params.pop("config_dir", None)) is not None:  # as an override it reaches every process of the run
            from aligner.settings.compose import override

            ctx.params["overrides"] = (*ctx.params["overrides"], override("hydra.searchpath", [f"file://{folder.resolve()}"]))
        return partial(self.callback, **ctx.params)

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(limit=200)  # whole sentences in the list of commands


def config_names(context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[str]:
    """The configs of conf/ whose names begin so, for completion in a shell."""
    from aligner.files import configs

    return [name for name in configs() if name.startswith(incomplete)]


def configs_or(kind: str, context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[Any]:
    """As `config_names`; the shell adds what it finds itself (`kind`: file, dir)."""
    from click.shell_completion import CompletionItem

    found = [CompletionItem(name) for name in config_names(context, parameter, incomplete)]
    return [CompletionItem(incomplete, type=kind), *found]


class PathType(click.Path):
    """A path, which need not exist yet."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from pathlib import Path  # here, since `aligner --help` needs none

        return Path(super().convert(value, param, ctx))


FILE = PathType(readable=False)
DIRECTORY = PathType(readable=False, file_okay=False)
CONFIG = "CONFIG: a recipe, such as ppo, or one of its configs in conf/ppo/, such as ppo_70b."
SETTINGS = "KEY=VALUE: settings, as for `aligner train`."
config_argument = click.argument("config", shell_complete=config_names)
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
config_dir = click.option("--config-dir", type=DIRECTORY, metavar="DIR", help="Where configs and presets of your own are.")
json_option = click.option("--json", "json_path", type=FILE, metavar="FILE", help="Write everything to FILE.")
run_directory = click.argument("directory", type=DIRECTORY, metavar="RUN_DIRECTORY")
RUN_DIRECTORY = "RUN_DIRECTORY: run.directory of the run, which may be under way."
