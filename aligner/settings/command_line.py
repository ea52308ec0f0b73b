"""What is typed after a program with settings: `key=value` texts, and options as Hydra spells them. Click reads the options; no Hydra."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import click

from aligner.errors import ConfigError

_WITHOUT_VALUE = {"--help": "--help=", "-h": "--help=", "--cfg": "--cfg=job", "-c": "--cfg=job"}  # options whose value is optional
_COMMAND = click.Command(
    "program",
    params=[
        click.Option(["--config-name", "-cn"]),
        click.Option(["--config-dir", "-cd"], multiple=True),
        click.Option(["--help", "-h", "topic"]),
        click.Option(["--cfg", "-c"], type=click.Choice(["job"])),
        click.Option(["--multirun", "-m"], is_flag=True),
        click.Argument(["texts"], nargs=-1, type=click.UNPROCESSED),
    ],
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)


@dataclass(kw_only=True, slots=True)
class CommandLine:
    """A command line, read."""

    config: str = ""  # the requested file; "": the recipe's own
    overrides: list[str] = field(default_factory=list)
    asks: str = ""  # what to do instead of running: --help, --cfg or --multirun
    topic: str = ""  # of --help
    unknown: list[str] = field(default_factory=list)  # options that do not exist, with the values behind them

    @property
    def asks_for_help_only(self) -> bool:
        return self.asks == "--help" and not (self.config or self.overrides or self.unknown)


def read(arguments: Sequence[str]) -> CommandLine:
    """Hydra's options, `config=NAME` too; `--config-dir` becomes an override. Raises ConfigError for an option without its value."""
    given = [
        _WITHOUT_VALUE.get(one, one) if not follows or "=" in follows or follows.startswith("-") else one
        for one, follows in zip(arguments, [*arguments[1:], ""], strict=False)
    ]
    try:
        found: Mapping[str, Any] = _COMMAND.make_context("program", given).params
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from error
    asked = {"--help": found["topic"] is not None, "--cfg": found["cfg"] is not None, "--multirun": found["multirun"]}
    line = CommandLine(
        config=(found["config_name"] or "").removesuffix(".yaml"),
        overrides=[override("hydra.searchpath", [f"file://{Path(place).resolve()}"]) for place in found["config_dir"]],
        asks=next((option for option, is_asked in asked.items() if is_asked), ""),
        topic=found["topic"] or "",
    )
    for text in found["texts"]:
        if text.startswith("-"):
            line.unknown.append(text)
        elif text.startswith("config="):
            line.config = text.removeprefix("config=")
        elif line.unknown and "=" not in line.unknown[-1] + text:  # of argparse: its value follows
            line.unknown[-1] += f"={text}"
        else:
            line.overrides.append(text)
    return line


def in_grammar(text: str) -> str:
    """`key=value` whose value is JSON with objects, which Hydra's grammar does not know, in that grammar; any other text as it is."""
    key, _, value = text.partition("=")
    if not ("{" in value and '"' in value):
        return text
    try:
        return override(key, json.loads(value))
    except (ValueError, RecursionError):
        return text


def override(key: str, value: Any) -> str:
    """`key=value` in Hydra's grammar, of a plain Python value or a path."""
    return f"{key}={_grammar(value)}"


def _grammar(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_grammar(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_grammar(one) for one in value)}]"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return quoted(value.value if isinstance(value, Enum) else str(value))


def quoted(text: str) -> str:
    """Any text as a quoted value of Hydra's grammar, in which a backslash escapes only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text) + "'"
