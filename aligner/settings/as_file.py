"""A config file that says what a config and overrides say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from aligner.errors import ConfigError
from aligner.settings.presets import find_file, groups_in


def as_file(base: str, overrides: Sequence[str], more: Mapping[str, str], folders: Sequence[Path], *, comment: str) -> str:
    """YAML that builds on the config `base`: presets and values of `overrides`, then those of `more`, which are plain values.

    `folders` have the config and its presets. Raises ConfigError for an override that removes a setting: a file cannot.
    """
    groups, chosen = groups_in(folders), dict(_presets(base, folders))
    added: list[Any] = []
    replaced: list[Any] = []
    tree: dict[str, Any] = {}
    for one in OverridesParser.create().parse_overrides([*overrides, *(f"{key}={value}" for key, value in more.items())]):
        if one.is_delete():
            raise ConfigError(f"{one.input_line!r}: a config file cannot remove what {base} has; leave it out to write one")
        if one.key_or_group in groups and isinstance(value := one.value(), str):
            entry = f"{one.key_or_group}@{one.package}" if one.package else one.key_or_group
            if entry in chosen:
                replaced.append({f"override {entry}": value})
            else:
                added.append({entry: value})
        else:
            _put(tree, one.key_or_group.split("."), one.value())
    text = yaml.safe_dump({"defaults": [base, *added, *replaced, "_self_"], **tree}, sort_keys=False, allow_unicode=True, width=140)
    return f"# {comment}\n{text}"


def _presets(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The groups from which a config, and those that it builds on, choose a preset."""
    path = find_file(name, folders)
    for entry in (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path is not None else []:
        if isinstance(entry, dict):
            yield from ((key.removeprefix("override ").strip(), value) for key, value in entry.items())
        elif entry != "_self_":
            yield from _presets(entry, folders)


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, leaf = path
    for name in sections:
        tree = tree.setdefault(name, {})
    tree[leaf] = value.value if isinstance(value, Enum) else value
