"""Which files of a directory are data, and of which split: `train-00000-of-00002.parquet`, `test.jsonl`, `validation/a.json`.

Hidden files, caches and descriptions that `datasets` writes, and what systems leave behind are no data. Files of several splits are
never read as one: DIR:SPLIT names what is meant, as `datasets:NAME:SPLIT` does.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from aligner.data.files import READABLE, suffix_of
from aligner.errors import DataError
from aligner.hub.names import DATASETS_PREFIX

_NO_DATA = re.compile(r"[.~]|__MACOSX$|(cache-|tmp).*\.arrow$|(dataset_infos?|dataset_dict|state|manifest|croissant)\.json$")
_UNREADABLE = (".zip", ".tar", ".gz", ".tgz", ".pkl", ".xlsx", ".feather", ".orc", ".avro", ".tfrecord")  # data, in files of other kinds
_ALIKE = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(word for words in _ALIKE.values() for word in words)})(?![a-z])", re.IGNORECASE)
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_SPLITS = "dataset_dict.json"  # lists the splits that `save_to_disk` wrote


def saved_by_datasets(folder: Path) -> bool:
    """Whether it is what `save_to_disk` of `datasets` wrote, of several splits or of one data set."""
    return (folder / _SPLITS).is_file() or all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def parted(location: str) -> tuple[str, str]:
    """(DIR, SPLIT) of DIR:SPLIT; (location, "") of anything else."""
    folder, _, split = location.rpartition(":")
    return (folder, split) if folder and not Path(location).exists() and Path(folder).is_dir() else (location, "")


def located(path: str, *, validates: bool = False, trains: bool = True) -> str:
    """`path` as DIR:SPLIT if it is a directory of splits and names none: for training `train`, for validation the split for that.

    Raises DataError for a directory that does not say which, and one of several splits that is named for both.
    """
    folder = Path(path)
    if path.startswith(DATASETS_PREFIX) or not folder.is_dir() or not (splits := _splits(folder)):
        return path
    found = [one for one in splits if one.lower() in _ALIKE["validation" if validates else "train"]]
    if validates and len(splits) == 1:
        found = splits
    elif len(found) != 1 or (validates and trains) or "" in splits:
        named = [one for one in splits if one]
        others = "" if len(named) == len(splits) else f", and of no split ({', '.join(one.name for one in _by_split(folder)[''][:3])})"
        raise DataError(
            f"data.{'validation' if validates else 'train'}={path}: the directory has files of the split{'s'[: len(named) - 1]} "
            f"{', '.join(named)}{others}; name the split that is meant: {path}:{named[-1]}"
        )
    return f"{path}:{found[0]}"


def role(location: Any, data: Any) -> dict[str, bool]:
    """What the settings `data` read a location for: arguments of `located`."""
    return {"validates": location == data.validation, "trains": location == data.train}


def data_files(location: str) -> list[Path]:
    """The files of DIR:SPLIT, or of a directory of no splits, in the order in which they are read; they may be missing.

    Raises DataError if there are none.
    """
    path, split = parted(location)
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    found = _by_split(folder)
    if not found:
        raise DataError(f"data directory {folder.absolute()} holds no file ending in {READABLE}")
    if split and split not in found:
        alike = next((words for words in _ALIKE.values() if split.lower() in words), ())
        split = next((one for one in found if one.lower() in alike), split)
    if split not in found:
        raise DataError(f"data directory {folder}: no split {split!r}, there are {', '.join(filter(None, found)) or 'none'}")
    places = sorted({_apart(file.relative_to(folder)) for file in found[split]})
    if split and len(places) > 1:
        raise DataError(
            f"{location}: the split {split!r} lies in {', '.join(places)}; name the directory that is meant: {folder / places[0]}"
        )
    return found[split]


def left_out(location: str) -> str:
    """What a directory has beside the files that are read and looks like data; empty if there is nothing."""
    folder = Path(parted(location)[0])
    if not folder.is_dir() or saved_by_datasets(folder):
        return ""
    files, below = _listed(folder)
    others = [
        one.name
        for one in folder.iterdir()
        if one.suffix.lower() in _UNREADABLE and not suffix_of(one.name) and not _NO_DATA.match(one.name)
    ]
    names = sorted([*(str(one.relative_to(folder)) for one in below if files), *others])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"not read: {', '.join(names[:3])}{more}" if names else ""


def _splits(folder: Path) -> list[str]:
    """The names of its splits; none if there is but one set of files, which has no name."""
    if (folder / _SPLITS).is_file():
        return [str(one) for one in json.loads((folder / _SPLITS).read_text())["splits"]]
    return [] if saved_by_datasets(folder) or set(found := _by_split(folder)) <= {""} else list(found)


def _by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files by the split of their names: those of the directory itself, if there are any, else those of the ones below."""
    files, below = _listed(folder)
    found: dict[str, list[Path]] = {}
    for file in files or below:
        found.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    return found


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data files of the directory itself, those of directories below), sorted; links are followed, each directory once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [one for one in folders if not _NO_DATA.match(one) and os.path.realpath(Path(place, one)) not in seen]
        found += [Path(place, one) for one in files if suffix_of(one) and not _NO_DATA.match(one)]
    own = sorted(one for one in found if one.parent == folder)
    return own, sorted(one for one in found if one.parent != folder)


def _split_of(file: Path) -> str:
    """The split of a file: of a directory that has its name, else of its own name; empty if there is none."""
    for part in file.parts[:-1]:
        if word := _WORD.fullmatch(part):
            return word[0]
    shard, word = _SHARD.match(file.name), _WORD.search(file.name)
    if shard and _WORD.match(shard[1]):
        return shard[1]  # train_sft of train_sft-00000-of-00003
    return word[0] if word else ""


def _apart(file: Path) -> str:
    """The directory of a file without what names splits: that of one data set beside others."""
    return "/".join(part for part in file.parts[:-1] if part != "data" and not _WORD.fullmatch(part)) or "."
