"""What was found, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.jobs.preflight.items import Finding, Level
from aligner.reporting.formats import seconds

WIDTH = 160
_STYLES = {Level.ok: "green", Level.warning: "yellow", Level.fatal: "bold red", Level.not_run: "dim"}


def console() -> Console:
    """A terminal at its own width, anything else at one that holds the table."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def show(name: str, findings: Mapping[str, Finding], out: Console) -> None:
    """Print all items, and in one line what follows."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("item", "", "found", "what to do", "time"):
        table.add_column(header, justify="right" if header == "time" else "left", ratio=None, overflow="fold")
    for item, finding in findings.items():
        time = seconds(finding.seconds) if finding.seconds else ""
        level = Text(finding.level.value, style=_STYLES[finding.level])
        table.add_row(item, level, Text(finding.found), Text(finding.advice), time)
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")  # logs keep no columns of blanks
    out.print(Text(f"{name}: {summary(findings)}"))


def summary(findings: Mapping[str, Finding]) -> str:
    """`ready`, or what stands in the way."""
    fatal = [name for name, finding in findings.items() if finding.level is Level.fatal]
    warnings = [name for name, finding in findings.items() if finding.level is Level.warning]
    noted = f" ({len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}: {', '.join(warnings)})" if warnings else ""
    return f"not ready: {', '.join(fatal)}{noted}" if fatal else f"ready{noted}"


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
