"""Programs whose command line is settings: what they do for it, and the exit code and outcome that they report."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode, exit_code_of
from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.reporting.formats import Column
from aligner.run.from_hub import fetch_named
from aligner.run.sweep import sweep
from aligner.settings.command_line import CommandLine, read
from aligner.settings.compose import compose, compose_node, own_folders, shown_values, to_object, to_yaml
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
    combination of `key=a,b`, or what another of Hydra's sweepers asks for, each as a run of its own (`aligner.run.sweep`), and shows the
    `columns` of all.

    The program ends with the exit code that `main` returns (None: 0); nothing else gives exit code 0. An AlignerError ends it with one line
    on stderr (ALIGNER_TRACEBACK=1 adds the traceback) and the code of `aligner.cluster.exit_codes`: 2 for ConfigError and DataError, 78 for
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
        keys = schema_keys(schema)
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
