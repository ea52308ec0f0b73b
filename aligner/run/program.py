"""Programs whose command line is settings: what Hydra's users type, and what its outcome is called outside."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode, exit_code_of
from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.reporting.formats import Column
from aligner.run.from_hub import fetch_named
from aligner.run.sweep import sweep
from aligner.settings import help as program_help
from aligner.settings.compose import compose, compose_node, override, search_path, shown_values, to_yaml
from aligner.settings.hints import hint
from aligner.settings.presets import find_file, folders_of, groups_of
from aligner.settings.schema import schema_keys
from aligner.telemetry import terminal

T = TypeVar("T")

_SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cn": "--config-name", "-cd": "--config-dir"}  # Hydra's
_TAKE_A_VALUE = ("--config-name", "--config-dir")
_KNOWN = ("--help", "--cfg", "--multirun")
_CFG = "job"  # what --cfg can print


@dataclass(kw_only=True, slots=True)
class Command:
    """A command line, read."""

    config: str = ""  # the file that was asked for; "": the recipe's own
    overrides: list[str] = field(default_factory=list)
    topic: str = ""  # that --help is asked about
    flags: set[str] = field(default_factory=set)

    @property
    def asks(self) -> str:
        """The option that says what to do instead of running; "": run."""
        return next((flag for flag in _KNOWN if flag in self.flags), "")


def parse(arguments: Sequence[str]) -> Command:
    """Options are Hydra's, with `config=NAME` for `--config-name NAME`. `--config-dir DIR` becomes the override that says the same, so that
    it reaches every process of a run. Raises ConfigError for an option without its value.
    """
    command, rest = Command(), list(arguments)
    while rest:
        name, equals, value = (argument := rest.pop(0)).partition("=")
        flag = _SHORT.get(name, name)
        if not argument.startswith("-"):
            if name == "config" and equals:
                command.config = value
            else:
                command.overrides.append(argument)
            continue
        if flag in _TAKE_A_VALUE:
            if not (value := value if equals else rest.pop(0) if rest else ""):
                raise ConfigError(f"{flag} needs a value: {flag} {'NAME' if flag == '--config-name' else 'DIRECTORY'}")
            if flag == "--config-name":
                command.config = value.removesuffix(".yaml")
            else:
                command.overrides.append(override("hydra.searchpath", [f"file://{Path(value).resolve()}"]))
            continue
        if flag not in _KNOWN:  # of argparse: its value follows
            follows = not equals and bool(rest) and "=" not in rest[0] and not rest[0].startswith("-")
            command.flags.add(f"{argument}={rest.pop(0)}" if follows else argument)
            continue
        command.flags.add(flag)
        if flag in ("--help", "--cfg"):
            follows = bool(rest) and "=" not in rest[0] and not rest[0].startswith("-")
            value = value if equals else rest.pop(0) if follows else ""
            if flag == "--help":
                command.topic = value
            elif value not in ("", _CFG):
                raise ConfigError(f"--cfg {value}: allowed: --cfg {_CFG} (the settings of the run)")
    return command


def entrypoint(
    schema: type[T], name: str, folders: Sequence[Path] | None = None, columns: Sequence[Column] = ()
) -> Callable[[Callable[[T], int | None]], Callable[..., None]]:
    """Decorator that turns `main(config)` into a program: `main()` reads sys.argv, composes `<name>.yaml` of the folders and calls it.

    `--config-name ppo_70b`, or `config=ppo_70b`, chooses another config of the recipe; `--config-dir DIR` adds a folder of the user's.
    `--help` prints the settings that matter most with value and meaning, `--help SECTION` and `--help all` others
    (`aligner.settings.help`); `--cfg job` prints the resolved YAML (??? for what is required and not given). `--multirun` runs every
    combination of `key=a,b`, or what another of Hydra's sweepers asks for, each as a run of its own (`aligner.run.sweep`), and shows the
    `columns` of all.

    The program ends with the exit code that `main` returns (None: 0), and with 0 in no other way. An AlignerError ends it with one line on
    stderr (ALIGNER_TRACEBACK=1 adds where it came from) and the code of `aligner.cluster.exit_codes`: 2 for ConfigError and DataError, 78
    for RunHalted, 1 for the others. Anything else is a bug and keeps its traceback and exit code 1.
    """

    def decorate(main: Callable[[T], int | None]) -> Callable[..., None]:
        def run(argv: Sequence[str] | None = None, program: str = "") -> None:
            terminal.guard()
            try:
                command = parse(sys.argv[1:] if argv is None else argv)
                with outcomes.unless_ended_early(os.environ):
                    code = _do(
                        main, schema, _Program(name, folders or folders_of(name), columns, program or f"python {sys.argv[0]}"), command
                    )
            except AlignerError as error:
                if os.environ.get("ALIGNER_TRACEBACK") == "1":
                    traceback.print_exc()
                outcomes.fail(os.environ, exit_code_of(error), str(error))
                raise SystemExit(int(exit_code_of(error))) from error
            except BrokenPipeError:  # of `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = ExitCode.done
            except Exception as error:
                if isinstance(error, OSError) and is_storage_error(error):  # no bug, and it says all: a full disk, one that is read-only
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


@dataclass(frozen=True, slots=True)
class _Program:
    name: str  # of the recipe
    folders: Sequence[Path]
    columns: Sequence[Column]
    typed: str  # how it is called


def _do(main: Callable[[T], int | None], schema: type[T], program: _Program, command: Command) -> int:
    """Do what the command line asks for; the exit code."""
    keys, folders = list(schema_keys(schema)), program.folders
    if unknown := sorted(command.flags - set(_KNOWN)):
        lines = []
        for typed, (option, _, value) in ((one, one.partition("=")) for one in unknown):
            meant = hint(option.lstrip("-").replace("-", "_"), keys)
            meant = re.sub(r"(?<=did you mean )([\w.]+)\?", lambda found, value=value: f"{found[1]}={value}?", meant) if value else meant
            lines.append(f"unknown option {typed}; settings are written key=value; {meant}")
        raise ConfigError("\n  ".join(lines))
    config = _chosen(program.name, command, folders)
    if command.asks == "--help":
        values = dict(shown_values(compose_node(schema, config, command.overrides, folders), keys))
        users = [place for place in search_path(command.overrides)[0] if isinstance(place, Path)]
        groups = groups_of(keys, [*folders, *users])
        print(program_help.render(keys, values, program=program.typed, file=config, groups=groups, topic=command.topic), flush=True)
    elif command.asks == "--cfg":
        node = compose_node(schema, config, command.overrides, folders)
        complete = not OmegaConf.missing_keys(node)
        text = to_yaml(compose(schema, config, command.overrides, folders)) if complete else OmegaConf.to_yaml(node, resolve=True)
        print(text, end="", flush=True)
    elif command.asks == "--multirun":
        return sweep(schema, config, command.overrides, folders, columns=program.columns)
    else:
        settings = compose(schema, config, command.overrides, folders)
        fetch_named(settings, records=True)
        return int(main(settings) or 0)
    return 0


def _chosen(name: str, command: Command, folders: Sequence[Path]) -> str:
    """The config that the command line names. Raises ConfigError if the recipe `name` has none that is called so."""
    places = [folders[0], *(place for place in search_path(command.overrides)[0] if isinstance(place, Path))]
    if command.config and find_file(command.config, places) is None:
        own = ", ".join(sorted(file.stem for place in places for file in place.glob("*.yaml")))
        raise ConfigError(f"config={command.config}: this program is of {name}; allowed: {own}, or a file in --config-dir DIR")
    return command.config or name
