"""Checks and their results: every item of the preflight is an `Item`, and ends as a `Finding`.

Findings are printed as a table for people or as JSON for programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from textwrap import shorten
from typing import Any, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.commands.preflight.allocation import Allocation
from aligner.errors import ConfigError
from aligner.reporting.formats import seconds
from aligner.run.settings import JobRun


class Level(str, Enum):
    """How an item ended. Only `fatal` changes the exit code."""

    ok = "ok"
    warning = "warning"
    fatal = "fatal"
    not_run = "not run"


class Where(str, Enum):
    """Which ranks look."""

    every_rank = "every rank"
    every_node = "every node"  # the first rank of each
    first_rank = "first rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one item: `found` in a few lines, `advice` for the user, `figures` for programs."""

    level: Level
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class Context:
    """Inputs of a check. `job`, the composed config, is set once the item `config` has run."""

    allocation: Allocation
    name: str  # of the file in conf/
    overrides: tuple[str, ...]
    with_engine: bool = False
    job: JobRun | None = None
    findings: dict[str, Finding] = field(default_factory=dict)  # of the items before this one

    @property
    def config(self) -> JobRun:
        """The composed config. Raises ConfigError if composing it failed."""
        if self.job is None:
            raise ConfigError(f"the config {self.name} could not be composed")
        return self.job


@dataclass(frozen=True, slots=True)
class Item:
    """One check: some ranks `observe`, alone or collectively, and rank 0 judges the observations.

    `observe` returns a dataclass of JSON values, its return annotation, or raises; whatever it raises is fatal and named with its ranks.
    `judge` gets the observations by rank. An item is skipped if one that it `needs` was fatal or skipped for that reason.
    """

    name: str  # for --only
    where: Where
    observe: Callable[[Context], Any]
    judge: Callable[[Context, Mapping[int, Any]], Finding]
    timeout_seconds: float
    needs: tuple[str, ...] = ()
    advice: str = "mend this and start again"  # where a rank failed to observe

    @property
    def kind(self) -> type:
        """Of the observations."""
        return get_type_hints(self.observe)["return"]


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` of 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def who(allocation: Allocation, ranks: Sequence[int]) -> str:
    """Ranks with their nodes, for a person: `rank 3 on n2`, `ranks 0-7 on n1, n2`, `all ranks`."""
    if len(ranks) == allocation.world.world_size > 1:
        return "all ranks"
    nodes = list(dict.fromkeys(allocation.node_of(rank) for rank in sorted(ranks)))
    shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} on {shown}"


WIDTH = 160
_SHOWN = 300  # characters of a finding in the last line
_STYLES = {Level.ok: "green", Level.warning: "yellow", Level.fatal: "bold red", Level.not_run: "dim"}


def console() -> Console:
    """A terminal at its own width, anything else at one that holds the table."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def show(findings: Mapping[str, Finding], out: Console, *, has_header: bool = True) -> None:
    """Print these rows of the table: as one after the other is found, or all at once; the columns are as wide in either case."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for width, justify in ((10, "left"), (7, "left"), (7, "right")):
        table.add_column(width=width, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(overflow="fold")
    if has_header:
        table.add_row("item", "", "time", "found, and what to do", style="bold")
    for item, finding in findings.items():
        level = Text(finding.level.value, style=_STYLES[finding.level])
        told = Text("\n".join(filter(None, [finding.found, finding.advice and f"-> {finding.advice}"])))
        table.add_row(item, level, seconds(finding.seconds) if finding.seconds else "", told)
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")  # logs keep no columns of blanks
    out.file.flush()


def summary(findings: Mapping[str, Finding]) -> str:
    """`ready`, or every obstacle with what was found and what to do about it, in one line."""
    fatal = {name: finding for name, finding in findings.items() if finding.level is Level.fatal}
    warnings = [name for name, finding in findings.items() if finding.level is Level.warning]
    noted = f" ({len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}: {', '.join(warnings)})" if warnings else ""
    told = [f"{name}: {shorten(one.found, _SHOWN)}{f' -> {one.advice}' if one.advice else ''}" for name, one in fatal.items()]
    return f"not ready: {'; '.join(told)}{noted}" if fatal else f"ready{noted}"


def to_json(name: str, findings: Mapping[str, Finding]) -> str:
    """Everything; keys keep their names and meaning from version to version. Sizes in bytes, times in seconds unless the key says more."""
    tree = {
        "config": name,
        "ready": all(finding.level is not Level.fatal for finding in findings.values()),
        "items": {
            item: asdict(finding) | {"level": finding.level.value, "figures": dict(finding.figures)} for item, finding in findings.items()
        },
    }
    return json.dumps(tree, indent=2) + "\n"
