"""Raw records with their origin, from jsonl, json, csv, parquet and Arrow files, directories of them, and `datasets` names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.data.files import READABLE, lines_of, read_arrow, read_csv, suffix_of
from aligner.data.folders import data_files, located, parted, saved_by_datasets
from aligner.errors import DataError
from aligner.hub.names import DATASETS_PREFIX


class Fields(dict[str, Any]):
    """A JSON object that remembers which of its fields were looked up by name. `repeated`: a name that it had twice."""

    __slots__ = ("read", "repeated")

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        dict.__init__(self, pairs)
        self.read: set[str] = set()
        self.repeated = ""
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            self.repeated = next(name for number, name in enumerate(names) if name in names[:number])

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's; the field counts as looked up."""
        self.read.add(name)
        return dict.get(self, name, default)

    def unused(self, prefix: str = "") -> Iterator[str]:
        """Names of non-empty fields that were not read; `messages[].name` in the objects of a list that was."""
        for name, value in self.items():
            if name not in self.read:
                if value is not None and value != "":
                    yield prefix + name
            elif isinstance(value, Fields):
                yield from value.unused(f"{prefix}{name}.") if value.read else ()
            elif isinstance(value, list) and value and isinstance(value[0], Fields):
                for one in value:
                    if isinstance(one, Fields) and one.read:
                        yield from one.unused(f"{prefix}{name}[].")


def nested(record: dict[str, Any], name: str) -> Any:
    """The field of that name, or the one inside of another (also as JSON text) that a dotted name leads to; None if there is neither."""
    if name in record or "." not in name:
        return record.get(name)
    parts = name.split(".")
    for cut in range(1, len(parts)):
        outer = record.get(".".join(parts[:cut]))
        if isinstance(outer, str) and outer.lstrip().startswith("{"):
            try:
                outer = json.loads(outer)
            except ValueError:
                continue
        if isinstance(outer, dict) and (found := nested(outer, ".".join(parts[cut:]))) is not None:
            return found
    return None


class Struct(Fields):
    """An object of an Arrow file: it holds null for every field that it lacks and that another row of its column has."""

    __slots__ = ()


_JSON = json.JSONDecoder(object_pairs_hook=Fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRecord:
    """One record: `line` counts from 1 (lines of jsonl, records of anything else), `index` from 0 over the whole data set.

    Objects in `value` are `Fields`, so that unused fields are known. `error` says why there is no `value` (a line that is not JSON).
    """

    file: str
    line: int
    index: int
    value: object = None
    error: str = ""

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


_Item = tuple[int, object, str]  # line, value, error


def read_records(location: str, first: int | None = None) -> Iterator[RawRecord]:
    """All records, or the `first` so many, of a file, a directory (its files by name) or a `datasets:` name, in a fixed order.

    Raises: DataError if nothing can be read at `location`; a single bad line is yielded with its `error`.
    """
    index = 0
    for name, items in _open(location):
        for line, value, error in items:
            if index == first:
                return
            yield RawRecord(file=name, line=line, index=index, value=value, error=error)
            index += 1


def _open(location: str) -> Iterator[tuple[str, Iterator[_Item]]]:
    if location.startswith(DATASETS_PREFIX):
        yield location, _read_datasets(location)
        return
    location = located(location)
    folder, split = parted(location)
    if saved_by_datasets(Path(folder)):
        yield location, _read_datasets(f"{DATASETS_PREFIX}{folder}{split and ':'}{split}")
        return
    for file in data_files(location):
        if not file.is_file():
            raise DataError(f"data file {str(file)!r} does not exist (looked for {file.absolute()})")
        yield str(file), _reader(file)


def _reader(file: Path) -> Iterator[_Item]:
    kind = suffix_of(file.name)
    if not kind:
        raise DataError(f"data file {str(file)!r} ends in {file.suffix!r}, allowed: {READABLE}")
    if kind in (".csv", ".tsv"):
        return _numbered(read_csv(file), Fields)
    return _numbered(read_arrow(file)) if kind in (".parquet", ".arrow") else _read_json(file) if kind == ".json" else _read_jsonl(file)


def _numbered(rows: Iterable[dict[str, Any]], kind: type[Fields] = Struct) -> Iterator[_Item]:
    for number, value in enumerate(rows, start=1):
        yield number, _fields(value, kind), ""


def _read_jsonl(file: Path) -> Iterator[_Item]:
    """Lines end at a line feed only (JSON strings may hold other separators); blank lines hold no record."""
    for line, raw in enumerate(lines_of(file), start=1):
        if not raw.strip():
            continue
        try:
            yield _checked(line, _JSON.decode(raw.decode("utf-8-sig" if line == 1 else "utf-8")))
        except (ValueError, RecursionError) as error:
            yield line, None, f"is not a JSON value in UTF-8 ({error}), expected one JSON object per line"


def _read_json(file: Path) -> Iterator[_Item]:
    try:
        values = _JSON.decode(b"".join(lines_of(file)).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):  # one object per line, as `datasets` writes .json
            yield from _read_jsonl(file)
            return
        raise DataError(f"{file}: is not JSON in UTF-8 ({error})") from error
    if not isinstance(values, list):
        what = f"object, of {', '.join(map(repr, values))}" if isinstance(values, dict) else type(values).__name__
        raise DataError(f"{file}: holds one {what}, expected a list of objects, or one object per line")
    for number, value in enumerate(values, start=1):
        yield _checked(number, value)


def _checked(line: int, value: object) -> _Item:
    """An item with the value; with an error where an object in it has a field twice: JSON takes the last one, whatever was meant."""
    if name := _repeated(value):
        return line, None, f"has the field {name!r} twice in one object, expected each field once"
    return line, value, ""


def _repeated(value: object) -> str:
    if isinstance(value, Fields):
        return value.repeated or next(filter(None, map(_repeated, value.values())), "")
    if isinstance(value, list) and value and isinstance(value[0], (Fields, list)):
        return next(filter(None, map(_repeated, value)), "")
    return ""


def _fields(value: Any, kind: type[Fields]) -> Any:
    """A value with `Fields` of a kind for its dicts."""
    if isinstance(value, dict):
        return kind([(name, _fields(one, kind)) for name, one in value.items()])
    return [_fields(one, kind) for one in value] if isinstance(value, list) and value and isinstance(value[0], (dict, list)) else value


def _read_datasets(location: str) -> Iterator[_Item]:
    """`datasets:NAME`, `datasets:NAME:SPLIT` or `datasets:NAME:CONFIG:SPLIT`; NAME may be a directory made by `save_to_disk`."""
    import datasets
    from datasets.exceptions import DatasetsError

    name, *rest = location[len(DATASETS_PREFIX) :].split(":")
    if not name or len(rest) > 2:
        raise DataError(f"data location is {location!r}, allowed: datasets:NAME, datasets:NAME:SPLIT, datasets:NAME:CONFIG:SPLIT")
    split = rest[-1] if rest else "train"
    saved = saved_by_datasets(Path(name))
    try:
        rows = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, *rest[:-1], split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"data location {location!r} does not load with `datasets`: {type(error).__name__}: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise DataError(f"data location {location!r}: no split {split!r}, there are {', '.join(rows)}")
        rows = rows[split]
    elif saved and rest and split != str(rows.split or "train"):
        raise DataError(f"data location {location!r}: no split {split!r}: one data set was saved there")
    yield from _numbered(rows)
