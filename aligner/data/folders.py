"""Which files of a directory are data, and of which split: `train-00000-of-00002.parquet`, `test.jsonl`, `validation/a.json`.

Files of several splits are never read as one: DIR:SPLIT names what is meant, as `datasets:NAME:SPLIT` does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from aligner.data.files import READABLE, suffix_of
from aligner.errors import DataError
from aligner.hub.names import DATASETS_PREFIX

# Hidden files, caches, what systems leave behind, and what describes data.
_NO_DATA = re.compile(r"[.~]|__MACOSX$|(cache-|tmp).*\.arrow$|(dataset_infos?|dataset_dict|state|manifest|croissant)\.json$")
_OTHERS = (".zip", ".tar", ".tgz", ".gz", ".pkl", ".xlsx", ".feather", ".orc", ".avro", ".tfrecord")  # data of kinds that are not read
_TRAIN, _TEST = ("train", "training"), ("test", "testing")
_VALIDATION = ("validation", "valid", "val", "dev", "eval", "evaluation")
_WORD = re.compile(rf"(?<![a-z])({'|'.join(_TRAIN + _TEST + _VALIDATION)})(?![a-z])", re.IGNORECASE)
_SHARD = re.compile(rf"({_WORD.pattern}.*)-\d{{5}}-of-\d{{5}}", re.IGNORECASE)
_SPLITS = "dataset_dict.json"  # lists the splits that `save_to_disk` wrote


def saved_by_datasets(folder: Path) -> bool:
    """Whether it is what `save_to_disk` of `datasets` wrote, of several splits or of one data set."""
    return (folder / _SPLITS).is_file() or all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def parted(location: str) -> tuple[str, str]:
    """(DIR, SPLIT) of DIR:SPLIT; (location, "") of anything else."""
    folder, _, split = location.rpartition(":")
    return (folder, split) if folder and not Path(location).exists() and Path(folder).is_dir() else (location, "")


def located(path: str, location: Any = None, data: Any = None) -> str:
    """`path` as DIR:SPLIT if it is a directory of splits and names none: for training `train`, for validation the split for that.

    The settings `data` name it in `location`. Raises DataError for a directory that does not say, or of several splits named for both.
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
            f"{', '.join(named)}{others}; name the split that is meant: {path}:{named[-1]}"
        )
    return f"{path}:{found[0]}"


def data_files(location: str) -> list[Path]:
    """The files of DIR:SPLIT, or of a directory of no splits, in the order in which they are read. Raises DataError if there are none."""
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
        raise DataError(f"{location}: the split {split!r} lies in {names}; name the directory that is meant: {folder / min(inner)}")
    return found[split]


def left_out(location: str) -> str:
    """What a directory has beside the files that are read and looks like data; empty if there is nothing."""
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
    """The names of its splits; none if there is but one set of files, which has no name."""
    if (folder / _SPLITS).is_file():
        return sorted(one.parent.name for one in folder.glob("*/state.json"))
    return [] if saved_by_datasets(folder) or set(found := _by_split(folder)) <= {""} else list(found)


def _by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files by the split of their names; `train_sft` is that of `train_sft-00000-of-00003`."""
    found: dict[str, list[Path]] = {}
    for file in _listed(folder):
        inside = file.relative_to(folder).parts[:-1]
        words = [*filter(None, map(_WORD.fullmatch, inside)), _SHARD.match(file.name) or _WORD.search(file.name)]
        found.setdefault(words[0][1] if words[0] else "", []).append(file)
    return found


def _listed(folder: Path) -> list[Path]:
    """The data files of the directory itself or, if it has none, of those below; links are followed, each directory once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [one for one in folders if not _NO_DATA.match(one) and os.path.realpath(Path(place, one)) not in seen]
        found += [Path(place, one) for one in files if suffix_of(one) and not _NO_DATA.match(one) and "blocks.npy" not in files]
        if found and Path(place) == folder:
            break
    return sorted(found)
