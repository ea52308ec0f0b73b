"""The mapping tables, tables/<framework>.yaml, as objects.

A table's head describes how the framework is recognised, an entry of `keys` what one of its keys is here:

- `key` (with `*`: any key that matches and has no entry of its own), its other names (`also`), and the recipes of ours that it applies to
  (`recipes`; default: all).
- `ours`: one setting or several. They get the value, unchanged or as `values` translates it, times `factors` (other keys, `ranks`, or a
  derived factor of special.py), plus `plus`; `products` has further settings, each with the keys that the value is multiplied by.
  `transform` names a function of transforms.py or special.py. `settings` gives for each value the settings that it means; with a
  transform, `*` adds settings.
- `into`: settings that other keys set and that this one is a part of.
- `default`: the framework's own value if the key is not given; or one for each recipe. Without it nothing follows from its absence.
- `meaning`: `another` (`note` has the difference) or `none` (no counterpart). `idle`: values with nothing to carry over.
- `severity` of what is not carried over: `result` (it changes the result: another experiment), `said` (the user must know it; the default
  of another meaning) or `cosmetic` (the default of keys without a counterpart). `question`: what the user is asked then.
- `only`, `unless`: other keys and the values with which the key has, or does not have, an effect.

What a program or a file trains is a name of `recipes`; a name that begins with `!` means that it trains nothing, and is followed by what
does its work here; `=stem` is the program's own name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

VALUE_HEAD = "AutoModelForCausalLMWithValueHead"  # TRL's policy with a head of values, as a key
_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    key: str
    also: Sequence[str] = ()
    recipes: Sequence[str] = ()
    ours: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    factors: Sequence[str] = ()
    plus: float = 0
    products: Mapping[str, Sequence[str]] = field(default_factory=dict)
    into: Sequence[str] = ()
    settings: Mapping[str, Mapping[str, Any]] | None = None
    transform: str = ""
    default: Any = None
    meaning: str = ""
    severity: str = ""
    question: str = ""
    idle: Sequence[Any] = ()
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unless: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.key, *self.also

    def default_for(self, recipe: str) -> Any:
        return self.default.get(recipe) if isinstance(self.default, dict) else self.default


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    name: str
    source: str  # where its defaults were read
    style: str  # hydra (key=value) or flags (--key value)
    programs: Mapping[str, str]  # a pattern of the word that starts it: what it trains; `?`: its keys decide (by_keys)
    recipes: Mapping[str, Any]  # what it trains: our recipe, or {key: value of that key: our recipe}
    files: Mapping[str, str] = field(default_factory=dict)  # a key of a YAML file: what that trains
    by_keys: Mapping[str, str] = field(default_factory=dict)  # a key of a command whose program does not decide it: what that trains
    by_path: Mapping[str, str] = field(default_factory=dict)  # a part of the script's path if keys do not decide it: what that trains
    trainers: Mapping[str, str] = field(default_factory=dict)  # a trainer's class in a Python program: what that trains
    own_configs: Sequence[str] = ()  # names of its own config files, whose values are the defaults of `keys`
    parts: Mapping[str, str] = field(default_factory=dict)  # a program that is a part of another's run: the prefix of its keys there
    config_flags: Sequence[str] = ()  # options that name a YAML file of further keys
    mirrors: Mapping[str, str] = field(default_factory=dict)  # a prefix of our settings: the prefix of a section that gets the same values
    ranks: Sequence[str] = ()  # keys whose product is the number of ranks
    keys: Sequence[Entry] = ()

    def program_in(self, words: Sequence[str]) -> tuple[int, str] | None:
        """(place of the word that starts it, what it trains)."""
        for place, word in enumerate(words):
            for pattern, trains in self.programs.items():
                first, _, second = pattern.partition(" ")
                if re.search(first, word) and (not second or (place + 1 < len(words) and re.search(second, words[place + 1]))):
                    return place + bool(second), Path(word).stem if trains == "=stem" else trains
        return None

    def trained_by_file(self, written: Mapping[str, Any]) -> str:
        """What a file with these keys trains; empty: it is not of this framework, or its keys do not decide it."""
        return next((self._named(trains, written) for key, trains in self.files.items() if _has(written, key)), "")

    def trained_by_keys(self, given: Mapping[str, Any]) -> str:
        """The same of a command's keys."""
        return next((self._named(trains, given) for key, trains in self.by_keys.items() if all(one in given for one in key.split("+"))), "")

    def recipe_for(self, trains: str, given: Mapping[str, Any]) -> str:
        """Our recipe; empty if none does the same."""
        if trains not in self.recipes:
            return ""
        chosen = self.recipes[trains]
        if isinstance(chosen, str):
            return chosen
        ((key, by_value),) = chosen.items()
        entries = [one for one in self.keys if one.key == key]
        names = [key, *(name for one in entries for name in one.also)]
        default = next((one.default for one in entries if one.default is not None), None)
        value = next((given[name] for name in names if given.get(name) is not None), default)
        return str(by_value.get(as_text(value), by_value.get("*", "")))

    def knows(self, key: str) -> bool:
        return any(key in entry.names for entry in self.keys)

    def entries_for(self, recipe: str) -> list[Entry]:
        """The first entry of each key."""
        found: dict[str, Entry] = {}
        for entry in self.keys:
            if not entry.recipes or recipe in entry.recipes:
                found.setdefault(entry.key, entry)
        return list(found.values())

    def _named(self, trains: str, written: Mapping[str, Any]) -> str:
        """`=stage`: the value of that key."""
        return str(written.get(trains[1:], "")) if trains.startswith("=") else trains


@functools.cache
def tables() -> dict[str, Table]:
    """By the name of the file, without its ending."""
    return {path.stem: _table(yaml.safe_load(path.read_text())) for path in sorted(_FOLDER.glob("*.yaml")) if not path.stem.startswith("_")}


def as_text(value: Any) -> str:
    """A value in the form of a key in the tables' YAML."""
    if isinstance(value, list) and len(value) == 1:
        return as_text(value[0])
    return "null" if value is None else str(value).lower()


def _table(written: dict[str, Any]) -> Table:
    known = {one.name for one in fields(Entry)}
    entries = []
    included = [yaml.safe_load((_FOLDER / f"_{name}.yaml").read_text()) for name in written.pop("include", [])]
    for one in chain(written.pop("keys"), *included):
        if unknown := set(one) - known:
            raise ValueError(f"{written['name']}: {one['key']}: {', '.join(sorted(unknown))}: not a field of a table's entry")
        lists = {name: [one[name]] for name in ("ours", "also", "recipes", "factors", "into") if isinstance(one.get(name), str)}
        keyed = {name: {as_text(key): value for key, value in one[name].items()} for name in ("values", "settings") if name in one}
        entries.append(Entry(**(one | lists | keyed)))
    head = written | {"programs": {str(key): value for key, value in written["programs"].items()}}
    taken: set[tuple[str, str]] = set()
    own = []
    for entry in entries:  # the table's own entry comes before one that it includes
        recipes = entry.recipes or ("",)
        if not any((entry.key, recipe) in taken or (entry.key, "") in taken for recipe in recipes):
            own.append(entry)
            taken |= {(entry.key, recipe) for recipe in recipes}
    return Table(keys=own, **head)


def _has(tree: Mapping[str, Any], key: str) -> bool:
    """Whether there is `a.b` in nested mappings; `a+b`: both."""
    for one in key.split("+"):
        place: Any = tree
        for part in one.split("."):
            if not isinstance(place, dict) or part not in place:
                return False
            place = place[part]
    return True
