"""Several sources of one data set, as listed in `data.train` and `data.validation`. Light: only settings.

    data.train=[{path: math.jsonl, weight: 2}, {path: chats.parquet, weight: 1, max_records: 1000, apply_chat_template: true}]

Without weights the sources are one data set, as if in one file. `aligner.data.order` makes the batches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from aligner.errors import ConfigError
from aligner.hub.names import DATASETS_PREFIX, parse_data

Location = str | Sequence[Mapping[str, Any]]
OWN = ("path", "name", "weight", "max_records", "max_epochs")
# `data` settings that a source can override.
SETTINGS = (
    *("prompt_field", "response_field", "answer_field", "form", "learn", "apply_chat_template", "chat_template", "thinking"),
    *("special_text", "add_bos", "overlong", "bad_lines"),
)
_NAME = re.compile(r"[\w.-]+")
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source. `name` is for its metrics; `weight` 0: none. `max_records`: the number of records used, from the first (0: all);
    `max_epochs`: how often each of them is trained on at most (0: unlimited). `settings` override `data`."""

    path: str
    name: str
    weight: float = 0.0
    max_records: int = 0
    max_epochs: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, data: C) -> C:
        """The settings for reading the source."""
        alone = {"train": self.path, "validation": "", "mixture_temperature": 1.0}
        return replace(data, **alone, **self.settings) if self.settings else data  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sources of a data set, their numbers of examples, and `data.mixture_temperature`."""

    sources: tuple[Source, ...]
    sizes: tuple[int, ...]
    temperature: float = 1.0

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The shares are proportional to these; None if the sources are one data set, with each example once per epoch."""
        if any(source.weight for source in self.sources):
            return tuple(source.weight for source in self.sources)
        if self.temperature == 1 and not any(source.max_epochs for source in self.sources):
            return None
        return tuple(size ** (1 / self.temperature) for size in self.sizes)

    @property
    def limits(self) -> tuple[int, ...]:
        """The maximal number of examples of each source, including repeats; 0: unlimited."""
        return tuple(math.ceil(one.max_epochs * size) for one, size in zip(self.sources, self.sizes, strict=True))

    def summary(self) -> str:
        """One line on the shares."""
        weights = self.weights or self.sizes
        shares = [f"{one.name} {weight / sum(weights):.1%}" for one, weight in zip(self.sources, weights, strict=True)]
        return f"shares of the {len(self.sources)} sources: {', '.join(shares)}"


def sources(data: Any, location: Location, key: str = "data.train") -> list[Source]:
    """The sources in a list. Raises ConfigError for an invalid one, naming the entry, its value and what is allowed."""
    entries = [dict(entry) for entry in as_sources(location, key)]
    shared = Counter(_default_name(str(entry.get("path"))) for entry in entries if "name" not in entry)
    found = [_source(data, entry, f"{key}[{number}]", shared) for number, entry in enumerate(entries)]
    for number, source in enumerate(found):
        if source.name in (earlier.name for earlier in found[:number]):
            if "name" in entries[number]:
                raise ConfigError(f"{key}[{number}].name is {source.name!r}, which an earlier source has; allowed: another name")
            found[number] = replace(source, name=f"{source.name}_{number}")
    given = [source.weight > 0 for source in found]
    if any(given) and not all(given):
        raise ConfigError(f"{key}[{given.index(False)}] has no weight, and others have one; allowed: a weight for each source, or none")
    return found


def read_alone(data: C) -> list[tuple[str, C]]:
    """The path of every source of the training and validation data, each once, with the settings for reading it."""
    found: list[tuple[str, C]] = []
    for key in ("train", "validation"):
        location = getattr(data, key)
        if isinstance(location, str):
            found += [(location, data)] if location else []
        else:
            found += [(source.path, source.config(data)) for source in sources(data, location, f"data.{key}")]
    return [one for number, one in enumerate(found) if one not in found[:number]]


def as_sources(value: Any, key: str) -> str | list[dict[str, Any]]:
    """The value of the setting `key`: a path, or a list of mappings. Raises ConfigError for anything else."""
    if isinstance(value, (str, Path, int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f"{key} is {value!r}, allowed: a path, or a list such as [{{path: a.jsonl, weight: 2}}, {{path: b.jsonl, weight: 1}}]"
        )
    entries = [{"path": entry} if isinstance(entry, (str, Path)) else entry for entry in value]
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"{key}[{number}] is {entry!r}, allowed: a path, or {{path: ..., {', '.join(f'{one}: ...' for one in OWN[1:])}}}"
            )
    return [{str(name): one for name, one in entry.items()} for entry in entries]


def is_mixture(rows: object) -> bool:
    """Whether a list holds sources, not records: mappings with a path, and without fields that only records have."""
    allowed = {*OWN, *SETTINGS}
    is_list = isinstance(rows, (list, tuple)) and bool(rows)
    return is_list and all(isinstance(row, Mapping) and "path" in row and row.keys() <= allowed for row in rows)


def check_mixture(data: Any) -> None:
    """Check the sources of `data.train` and `data.validation`, and the temperature. Raises ConfigError."""
    temperature = data.mixture_temperature
    if isinstance(temperature, bool) or not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"data.mixture_temperature={temperature}: must be above 0")
    found = [] if isinstance(data.train, str) else sources(data, data.train)
    if temperature != 1 and (not found or any(source.weight for source in found)):
        why = "the sources have weights" if found else "data.train is one path"
        raise ConfigError(f"data.mixture_temperature={temperature:g}: {why}; allowed: 1, or a list of sources without weights")
    if not isinstance(data.validation, str):
        for number, source in enumerate(sources(data, data.validation, "data.validation")):
            if source.weight or source.max_epochs:
                name = "weight" if source.weight else "max_epochs"
                raise ConfigError(f"data.validation[{number}].{name}: every record is validated on once; allowed: none")


def _source(data: Any, entry: Mapping[str, Any], place: str, shared: Counter[str]) -> Source:
    own = [name for name in SETTINGS if name in {one.name for one in fields(data)}]
    if unknown := [name for name in entry if name not in OWN and name not in own]:
        raise ConfigError(f"{place}.{unknown[0]}: unknown setting of a source; allowed: {', '.join((*OWN, *own))}")
    path = entry.get("path")
    if not isinstance(path, (str, Path)) or not str(path):
        raise ConfigError(f"{place}.path is {path!r}, allowed: see data.train")
    name = entry.get("name", _default_name(str(path), with_parent=shared[_default_name(str(path))] > 1))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{place}.name is {name!r}, allowed: letters, digits, '.', '_' and '-'")
    source = Source(
        path=str(path),
        name=name,
        weight=_number(entry, "weight", place),
        max_records=int(_number(entry, "max_records", place, whole=True)),
        max_epochs=_number(entry, "max_epochs", place),
        settings={one: _like(getattr(data, one), entry[one], f"{place}.{one}") for one in own if one in entry},
    )
    try:
        source.config(data)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return source


def _default_name(path: str, *, with_parent: bool = False) -> str:
    """`data/math.jsonl.gz` -> math, or data_math; of the Hub's ORG/NAME@REV:SPLIT the NAME."""
    named = parse_data(path)
    place = Path(named[0].repo if named else path.removeprefix(DATASETS_PREFIX).partition(":")[0] or path)
    last = place.name.partition(".")[0] or place.name
    return re.sub(r"[^\w.-]", "_", f"{place.parent.name}_{last}" if with_parent else last) or "data"


def _number(entry: Mapping[str, Any], name: str, place: str, *, whole: bool = False) -> float:
    """A positive number; 0 if it is missing."""
    if name not in entry:
        return 0.0
    value = entry[name]
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < 2**53:
        raise ConfigError(f"{place}.{name} is {value!r}, allowed: a{' whole' if whole else ''} number above 0")
    return value


def _like(now: Any, value: Any, key: str) -> Any:
    if isinstance(now, Enum):
        options = type(now).__members__
        if not isinstance(value, (str, Enum)) or (text := value.name if isinstance(value, Enum) else value) not in options:
            raise ConfigError(f"{key} is {value!r}, allowed: {', '.join(options)}")
        return options[text]
    flag = now is None or isinstance(now, bool)  # `add_bos` may be null
    if not isinstance(value, (bool, type(now)) if flag else str):
        raise ConfigError(f"{key} is {value!r}, allowed: {'true, false' if flag else 'a text'}")
    return value
