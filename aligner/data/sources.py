"""Raw records with their origin, from files (jsonl, json, csv, parquet, Arrow; also compressed), directories, and `datasets` names.

Files of several splits are never read as one data set: DIR:SPLIT names a split, as `datasets:NAME:SPLIT` does."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aligner.errors import DataError
from aligner.hub.names import DATASETS_PREFIX

PACKED = (".gz", ".bz2", ".xz", ".zst")
TEXTUAL = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # may be compressed; the others have compression of their own
SUFFIXES = (*TEXTUAL, ".parquet", ".arrow", *(suffix + packed for packed in PACKED for suffix in TEXTUAL))
READABLE = f"{', '.join((*TEXTUAL, '.parquet', '.arrow'))}, and {', '.join(TEXTUAL)} with {', '.join(PACKED)}"  # for messages
# Columns of a CSV file with numbers, truth values or lists; cells of other columns are text, unless they are lists of objects.
_NOT_TEXT = frozenset(
    "label labels preference kto_tag preference_strength overall_preference chosen_reward rejected_reward score_chosen score_rejected "
    "chosen_score rejected_score chosen-rating rejected-rating helpfulness correctness coherence complexity verbosity "
    "history steps completions messages conversations tools images".split()
)
_TRUTHS = {"true": True, "false": False}


def suffix_of(name: str) -> str:
    """The suffix of a file's format, without its compression's; empty if the format is not supported."""
    found = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return next((found.removesuffix(packed) for packed in PACKED if found.endswith(packed)), found)


def opened(file: Path) -> IO[bytes]:
    """A file's bytes, decompressed."""
    packed = file.suffix.lower()
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(packed, open)(file, "rb")


def lines_of(file: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed. Raises DataError if it is damaged."""
    try:
        with opened(file) as stream:
            yield from stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if (packed := file.suffix.lower()) not in PACKED:
            raise
        kind = {".gz": "gzip", ".zst": "zstd"}.get(packed, packed[1:])
        raise DataError(f"{file}: is not a readable {kind} file: {error}") from error


def read_csv(file: Path) -> Iterator[dict[str, Any]]:
    """The rows below the header; .tsv has tabs between cells. An empty cell is null. Raises DataError for a row of another length."""
    csv.field_size_limit(sys.maxsize)  # for the whole process; the default of 128 KiB is too short for some texts
    lines = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(lines_of(file)))
    rows = csv.reader(lines, strict=True, delimiter="\t" if suffix_of(file.name) == ".tsv" else ",")
    try:
        header = next(rows, None)
        if not header or len(set(header)) < len(header):
            raise DataError(f"{file}:1: the header is {header}, expected names of columns, each once")
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(header):
                raise DataError(f"{file}:{number}: has {len(row)} cells, expected {len(header)} like the header")
            yield {name: _cell(name, cell) for name, cell in zip(header, row, strict=True)}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is not CSV in UTF-8: {error}") from error


def _cell(name: str, cell: str) -> Any:
    if not cell:
        return None
    if name not in _NOT_TEXT and not cell.startswith("[{"):
        return cell
    try:
        value = _TRUTHS[cell.lower()] if cell.lower() in _TRUTHS else json.loads(cell)
    except ValueError:
        return cell
    return value if name in _NOT_TEXT or all(isinstance(one, dict) for one in value) else cell


def read_arrow(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, or of an Arrow file or stream, memory-mapped. Raises DataError for anything else."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    kind = suffix_of(file.name)
    try:
        with ParquetFile(file) if kind == ".parquet" else pa.memory_map(str(file)) as stream:
            for batch in stream.iter_batches() if kind == ".parquet" else _batches(stream):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: is not a readable {kind[1:]} file: {error}") from error


def _batches(stream: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(stream)
    except pa.ArrowInvalid:  # `datasets` writes streams
        stream.seek(0)
        yield from pa.ipc.open_stream(stream)
        return
    yield from (table.get_batch(number) for number in range(table.num_record_batches))


# Hidden files, caches, leftovers of systems, and descriptions of data.
_NO_DATA = re.compile(r"[.~]|__MACOSX$|(cache-|tmp).*\.arrow$|(dataset_infos?|dataset_dict|state|manifest|croissant)\.json$")
_OTHERS = (".zip", ".tar", ".tgz", ".gz", ".pkl", ".xlsx", ".feather", ".orc", ".avro", ".tfrecord")  # data in unsupported formats
_TRAIN, _TEST = ("train", "training"), ("test", "testing")
_VALIDATION = ("validation", "valid", "val", "dev", "eval", "evaluation")
_WORD = re.compile(rf"(?<![a-z])({'|'.join(_TRAIN + _TEST + _VALIDATION)})(?![a-z])", re.IGNORECASE)
_SHARD = re.compile(rf"({_WORD.pattern}.*)-\d{{5}}-of-\d{{5}}", re.IGNORECASE)
_SPLITS = "dataset_dict.json"  # lists the splits that `save_to_disk` wrote


def saved_by_datasets(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote it, with several splits or as one data set."""
    return (folder / _SPLITS).is_file() or all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def parted(location: str) -> tuple[str, str]:
    """(DIR, SPLIT) of DIR:SPLIT; (location, "") of anything else."""
    folder, _, split = location.rpartition(":")
    return (folder, split) if folder and not Path(location).exists() and Path(folder).is_dir() else (location, "")


def located(path: str, location: Any = None, data: Any = None) -> str:
    """`path`, or DIR:SPLIT if it is a directory of splits: `train` for training, the validation split for validation.

    The settings `data` name it in `location`. Raises DataError if the split is ambiguous, or the same directory is named for both.
    """
    folder = Path(path)
    if path.startswith(DATASETS_PREFIX) or not folder.is_dir() or not (splits := _splits(folder)):
        return path
    validates = data is not None and location == data.validation
    found = [one for one in splits if one.lower() in (_VALIDATION if validates else _TRAIN)]
    if validates and len(splits) == 1:
        found = splits
    elif len(found) != 1 or "" in splits or (validates and location == data.train):
        named = [one for one in splits if one]
        others = f", and of no split ({', '.join(one.name for one in _by_split(folder)[''][:3])})" if "" in splits else ""
        raise DataError(
            f"data.{'validation' if validates else 'train'}={path}: the directory has files of the split{'s'[: len(named) - 1]} "
            f"{', '.join(named)}{others}; name the split: {path}:{named[-1]}"
        )
    return f"{path}:{found[0]}"


def data_files(location: str) -> list[Path]:
    """The files of DIR:SPLIT, or of a directory without splits, in reading order. Raises DataError if there are none."""
    path, split = parted(location)
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    if not (found := _by_split(folder)):
        raise DataError(f"data directory {folder.absolute()} holds no file ending in {READABLE}")
    alike = [one for one in found if any({one.lower(), split.lower()} <= set(words) for words in (_TRAIN, _TEST, _VALIDATION))]
    if (split := split if split in found or not alike else alike[0]) not in found:
        raise DataError(f"data directory {folder}: no split {split!r}, there are {', '.join(filter(None, found)) or 'none'}")
    inner = {
        Path(*(one for one in file.relative_to(folder).parts[:-1] if one != "data" and not _WORD.fullmatch(one))) for file in found[split]
    }
    if split and len(inner) > 1:
        names = ", ".join(sorted(map(str, inner)))
        raise DataError(f"{location}: the split {split!r} lies in {names}; name one of the directories: {folder / min(inner)}")
    return found[split]


def left_out(location: str) -> str:
    """Entries of a directory that look like data and are not read; empty if there are none."""
    folder = Path(parted(location)[0])
    if not folder.is_dir() or saved_by_datasets(folder) or all(one.parent != folder for one in _listed(folder)):
        return ""
    others = [one for one in sorted(folder.iterdir()) if not _NO_DATA.match(one.name) and not suffix_of(one.name)]
    names = [
        one.name
        for one in others
        if one.suffix.lower() in _OTHERS or (one.is_dir() and any(suffix_of(file.name) for file in one.iterdir()))
    ]
    return f"not read: {', '.join(names)}" if names else ""


def _splits(folder: Path) -> list[str]:
    """The names of its splits; empty if there is only one set of files, without a name."""
    if (folder / _SPLITS).is_file():
        return sorted(one.parent.name for one in folder.glob("*/state.json"))
    return [] if saved_by_datasets(folder) or set(found := _by_split(folder)) <= {""} else list(found)


def _by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files by the split in their names (`train_sft` of `train_sft-00000-of-00003`)."""
    found: dict[str, list[Path]] = {}
    for file in _listed(folder):
        inside = file.relative_to(folder).parts[:-1]
        words = [*filter(None, map(_WORD.fullmatch, inside)), _SHARD.match(file.name) or _WORD.search(file.name)]
        found.setdefault(words[0][1] if words[0] else "", []).append(file)
    return found


def _listed(folder: Path) -> list[Path]:
    """The data files of the directory itself or, if it has none, of the ones below; links are followed, each directory once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [one for one in folders if not _NO_DATA.match(one) and os.path.realpath(Path(place, one)) not in seen]
        found += [Path(place, one) for one in files if suffix_of(one) and not _NO_DATA.match(one) and "blocks.npy" not in files]
        if found and Path(place) == folder:
            break
    return sorted(found)


class Fields(dict[str, Any]):
    """A JSON object that records which of its fields were read. `repeated`: a name that occurred twice; `images`: of `ImageReader`."""

    __slots__ = ("images", "read", "repeated")

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        dict.__init__(self, pairs)
        self.read: set[str] = set()
        self.images: Any = None
        self.repeated = ""
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            self.repeated = next(name for number, name in enumerate(names) if name in names[:number])

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's; the field counts as read."""
        self.read.add(name)
        return dict.get(self, name, default)

    def unused(self, prefix: str = "") -> Iterator[str]:
        """Names of non-empty fields that were not read; `messages[].name` for the objects of a list that was read."""
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
    """The field of that name or, for a dotted name, the one inside another field (which may be JSON text); None if there is neither."""
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
    """An object of an Arrow file: a field that only other rows of its column have is null."""

    __slots__ = ()


_JSON = json.JSONDecoder(object_pairs_hook=Fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRecord:
    """One record: `line` counts from 1 (lines of jsonl, else records), `index` from 0 over the whole data set.

    Objects in `value` are `Fields`, so that unused fields are known. `error`: why there is no `value` (a line that is not JSON).
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
    """The `first` records (None: all) of a file, a directory (its files by name) or a `datasets:` name, in a fixed order.

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
    """Lines end at a line feed only (JSON strings may contain other separators); blank lines are skipped."""
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
        raise DataError(f"{file}: contains one {what}, expected a list of objects, or one object per line")
    for number, value in enumerate(values, start=1):
        yield _checked(number, value)


def _checked(line: int, value: object) -> _Item:
    """An item with the value, or with an error if an object in it has a field twice: JSON would silently keep the last one."""
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
    if isinstance(value, dict):
        return kind([(name, _fields(one, kind)) for name, one in value.items()])
    return [_fields(one, kind) for one in value] if isinstance(value, list) and value and isinstance(value[0], (dict, list)) else value


def _read_datasets(location: str) -> Iterator[_Item]:
    """`datasets:NAME`, `datasets:NAME:SPLIT` or `datasets:NAME:CONFIG:SPLIT`; NAME may be a directory from `save_to_disk`."""
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
        raise DataError(f"data location {location!r}: no split {split!r}: it was saved as one data set")
    # As Arrow's values: images as they were stored, not as pixels.
    yield from _numbered(row for batch in rows.with_format("arrow").iter(batch_size=1000) for row in batch.to_pylist())
