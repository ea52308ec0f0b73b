"""`aligner migrate`: reads the inputs, prints the command and the table, writes the config."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from aligner.commands.migrate.engine import Migration, Row, Severity, is_open, migrate as migrated, replaced
from aligner.commands.migrate.reading import joined, read
from aligner.commands.migrate.transforms import Kind
from aligner.commands.parts import MigrateOptions
from aligner.errors import ConfigError
from aligner.files import publish
from aligner.settings.command_line import override

OTHER = 3  # exit code: the printed command cannot run unchanged, or is another experiment


def migrate(inputs: Sequence[str], options: MigrateOptions) -> int:
    """Print what the inputs are here; returns OTHER if the command cannot run as it is printed, or is another experiment."""
    texts = [sys.stdin.read() if text == "-" else text for text in inputs]
    source = joined([read(text, framework=options.framework, trains=options.trains) for text in texts])
    found = migrated(source, ranks=options.ranks, examples=options.examples)
    print(report(found))
    if options.output is not None:
        text = written(found, options.output)
        publish(options.output, lambda path: path.write_text(text))
        print(f"\nwritten: {options.output}")
    if options.json_path is not None:
        names = ("framework", "trains", "recipe", "settings", "rows", "defaults", "open_questions", "stops")
        kept = {name: value for name, value in asdict(found).items() if name in names} | {"overrides": found.overrides()}
        text = json.dumps(kept, indent=2, default=str) + "\n"
        publish(options.json_path, lambda path: path.write_text(text))
    return OTHER if found.is_other else 0


def report(found: Migration) -> str:
    """The command and the table."""
    lines = [f"# {found.framework} {found.trains}: the recipe {found.recipe}; defaults there as in {found.source}", command_line(found)]
    if found.is_other:
        lines += ["", f"As it is printed, this cannot run or is another experiment (exit code {OTHER}): see the first two lists."]
    every = [*found.rows, *found.defaults]
    of = {severity: _table([row for row in every if row.severity is severity]) for severity in Severity}
    groups = {
        "Changes the result": of[Severity.result],
        "Must be said": [f"  - {text}" for text in found.open_questions] + of[Severity.said],
        "Mapped": _table([row for row in found.rows if row.kind is Kind.mapped]),
        "Same by default": _table([row for row in found.rows if row.kind is Kind.same]),
        f"Not given, and {found.framework}'s default is not ours": _table([row for row in found.defaults if row.severity is None]),
        "Cosmetic: speed, memory, logs": of[Severity.cosmetic],
    }
    for title, own in groups.items():
        if own:
            lines += ["", f"{title} ({len(own)})", *own]
    return "\n".join(lines)


def command_line(found: Migration) -> str:
    return " \\\n    ".join([f"aligner launch local {found.recipe}", *(_shell(key, value) for key, value in found.settings.items())])


def written(found: Migration, path: Path) -> str:
    """The text of the file: a config that builds on the recipe, or a script."""
    about = f"# From {found.framework} {found.trains} by `aligner migrate`; its defaults as in {found.source}.\n"
    questions = "".join(f"# To be said or checked: {question}\n" for question in found.open_questions)
    changed = (row for row in (*found.rows, *found.defaults) if row.severity is Severity.result)
    questions += "".join(f"# Changes the result: {row.key}={_shown(row.value)}: {row.note}\n" for row in changed)
    if path.suffix == ".sh":
        return f"#!/bin/bash\n{about}{questions}{command_line(found)}\n"
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {path}: give a name that ends with .yaml (a config) or .sh (the command)")
    tree: dict[str, Any] = {"defaults": [found.recipe, "_self_"]}
    for key, value in found.settings.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = replaced(value, "${{oc.env:{}}}")
    use = f"# aligner launch local {path.stem} --config-dir {path.parent}\n"
    return about + questions + use + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)


def _shell(key: str, value: Any) -> str:
    if is_open(value):
        return f'"{override(key, value)}"'
    if isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value):
        return f"{key}={value}"
    if isinstance(value, list) and all(re.fullmatch(r"\w+", str(one)) for one in value):
        return f"{key}=[{','.join(map(str, value))}]"
    text = override(key, value)
    if "'" in text and not re.search(r'["$`\\!]', text):
        return f'"{text}"'
    return text if isinstance(value, int | float) else shlex.quote(text)


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [
        (f"{row.key} = {_shown(row.value)}", ", ".join(f"{key}={_shown(value)}" for key, value in row.settings.items())) for row in rows
    ]
    width = min(60, max((len(given) for given, _ in cells), default=0))
    lines = []
    for row, (given, ours) in zip(rows, cells, strict=True):
        said = " | ".join(part for part in (ours, row.note) if part)
        lines.append(f"  {given:<{width}}  {said}".rstrip())
    return lines


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."
