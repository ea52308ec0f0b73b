"""From a name of the Hub to a directory: the local cache's where it has all that is needed, else after a download.

The cache is the one that all tools of Hugging Face share (HF_HOME, HF_HUB_CACHE). Its snapshots do not say whether they are whole, so a
record of our own, `aligner/<commit>.<files>.json` beside them, does: it is written before a download begins and again when it is complete.
A snapshot without one was made by another tool and counts as whole if the model's index says so.

One process at a time downloads a repository into a cache, under a lock file there; the others wait and then find it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from aligner.errors import AlignerError, ConfigError
from aligner.files import is_plain_name, publish
from aligner.hub.failures import explain
from aligner.hub.names import Files, HubName, Kind

INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SMALL = (".json", ".jinja", ".model", "merges.txt")  # files of a model beside its weights; none is a pickle or code
_DATA = tuple(
    f".{kind}{packed}"
    for kind in ("parquet", "jsonl", "json", "csv", "tsv", "txt", "arrow")
    for packed in ("", ".gz", ".zst", ".xz", ".bz2")
)
_NUM_WORKERS = 8
_SECONDS_BETWEEN_LINES = 10.0
_POLL_SECONDS = 0.5
WAIT_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a setting asks the Hub for."""

    key: str  # of the setting, for messages
    name: HubName
    files: Files = Files.model
    commit: str = ""  # the one that the run has used so far; empty: what the revision stands for now
    wait_seconds: float = WAIT_SECONDS  # for another process that downloads the same

    @property
    def text(self) -> str:
        return f"{self.key}={self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Where it is, and of which commit."""

    directory: Path
    commit: str


def endpoint() -> str:
    """The address of the Hub: HF_ENDPOINT."""
    return str(constants.ENDPOINT)


def is_offline() -> bool:
    """HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE): no network is to be used."""
    return bool(constants.HF_HUB_OFFLINE)


def fetch(wanted: Wanted, say: Callable[[str], object]) -> Found:
    """The directory with the files, downloaded if the cache lacks them. `say` prints a line about what takes time.

    Raises ConfigError for a name, revision or permission that the Hub does not know or give; AlignerError where there is no network, no
    space on the disk, or another process downloads for longer than `wait_seconds`.
    """
    folder = Path(constants.HF_HUB_CACHE) / wanted.name.folder
    found = _in_cache(folder, wanted)
    if found is not None:
        return found
    if is_offline():
        return _offline(folder, wanted, say)
    try:
        (folder / "aligner").mkdir(parents=True, exist_ok=True)
        with _alone(folder, wanted, say):
            found = _in_cache(folder, wanted)
            return found or _download(folder, wanted, say)
    except AlignerError:
        raise
    except Exception as error:
        raise explain(error, wanted.text, wanted.name, endpoint=endpoint(), cache=folder, has_token=bool(get_token())) from error


def _known_commit(folder: Path, wanted: Wanted) -> str:
    """The commit that is wanted, as far as this machine knows; empty if it does not."""
    if wanted.commit or wanted.name.is_pinned:
        return wanted.commit or wanted.name.revision
    ref = folder / "refs" / (wanted.name.revision or "main")
    return ref.read_text().strip() if ref.is_file() else ""


def _in_cache(folder: Path, wanted: Wanted) -> Found | None:
    """What the cache has whole."""
    commit = _known_commit(folder, wanted)
    directory = folder / "snapshots" / commit
    if not commit or not directory.is_dir():
        return None
    record = _read(_record(folder, commit, wanted.files))
    if record is None and wanted.files is Files.settings:
        record = _read(_record(folder, commit, Files.model))
    if record is not None:
        whole = bool(record["complete"]) and all((directory / file).is_file() for file in record["files"])
    else:
        whole = wanted.files is not Files.data and _looks_whole(directory, wanted.files)
        whole = whole and any((directory / file).is_file() for file in TOKENIZERS)
    return Found(directory=directory, commit=commit) if whole else None


def _looks_whole(directory: Path, files: Files) -> bool:
    """Whether a snapshot without a record has the config, and all of the weights if they are needed."""
    if not (directory / "config.json").is_file():
        return False
    if files is Files.settings or (directory / WEIGHTS[0]).is_file():
        return True
    return (directory / INDEX).is_file() and all((directory / file).is_file() for file in _shards(directory / INDEX))


def _shards(index: Path) -> list[str]:
    return sorted({_inside(file, index) for file in json.loads(index.read_text()).get("weight_map", {}).values()})


def _inside(file: str, where: object) -> str:
    """A file's name that the Hub, or an index from there, says. Raises ConfigError for one that leads elsewhere."""
    if not all(map(is_plain_name, file.split("/"))):
        raise ConfigError(f"{where}: names the file {file!r}; allowed: files inside the folder")
    return file


def _offline(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> Found:
    """What the cache has, where nothing better can be had. Raises ConfigError if that cannot be used."""
    commit = _known_commit(folder, wanted)
    directory = folder / "snapshots" / commit
    begun = commit and _read(_record(folder, commit, wanted.files)) is not None  # and not complete, or it would have been taken
    if begun:
        what = f"{directory} is not complete"
    elif not commit or not directory.is_dir():
        what = f"the cache {folder.parent} does not have {'that' if wanted.name.revision or wanted.commit else 'it'}"
    elif wanted.files is Files.data:
        if any(file.name.endswith(_DATA) for file in directory.rglob("*")):
            say(f"warning: {wanted.text}: offline, so nothing says whether all of its files are in {directory}")
            return Found(directory=directory, commit=commit)
        what = f"{directory} has no data files"
    elif _looks_whole(directory, wanted.files) or (wanted.files is Files.settings and _has_any(directory, TOKENIZERS)):
        return Found(directory=directory, commit=commit)
    else:
        what = f"{directory} lacks {'its config.json' if not (directory / 'config.json').is_file() else 'some of the weights'}"
    state = f" (commit {wanted.commit}, with which the run began)" if wanted.commit else ""
    kind = "--repo-type dataset " if wanted.name.kind is Kind.dataset else ""
    revision = f" --revision {wanted.commit or wanted.name.revision}" if wanted.commit or wanted.name.revision else ""
    raise ConfigError(
        f"{wanted.text}{state}: no such directory here, {what}, and HF_HUB_OFFLINE forbids a download: "
        f"run `hf download {kind}{wanted.name.repo}{revision}` where there is a network"
    )


def _has_any(directory: Path, files: Sequence[str]) -> bool:
    return any((directory / file).is_file() for file in files)


def _record(folder: Path, commit: str, files: Files) -> Path:
    return folder / "aligner" / f"{commit}.{files.value}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError:
        return {"complete": False, "files": []}


@contextmanager
def _alone(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> Iterator[None]:
    """Meanwhile no other process downloads this repository into this cache."""
    path = folder / "aligner" / "lock"
    lock, begun, told = filelock.FileLock(path), time.monotonic(), False
    while True:
        try:
            lock.acquire(timeout=min(_POLL_SECONDS, wanted.wait_seconds), poll_interval=0.05)
            break
        except filelock.Timeout:
            waited = time.monotonic() - begun
            if waited >= wanted.wait_seconds:
                raise AlignerError(
                    f"{wanted.text}: waited {waited:.0f} s for another process, which downloads it to {folder} and holds {path}"
                ) from None
            if not told:
                say(f"{wanted.text}: waiting for another process, which downloads it to {folder}")
                told = True
        except NotImplementedError:  # a file system without locks; huggingface_hub has ways of its own there to write a file once
            yield
            return
    try:
        yield
    finally:
        lock.release()


def _download(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> Found:
    name, api = wanted.name, HfApi(endpoint=endpoint())
    asked = wanted.commit or name.revision or "main"
    info = api.repo_info(name.repo, repo_type=name.kind.value, revision=asked, files_metadata=True)
    commit = str(info.sha)
    sizes = {_inside(one.rfilename, wanted.text): int(one.size or 0) for one in info.siblings or []}
    directory, record = folder / "snapshots" / commit, _record(folder, commit, wanted.files)
    first = _small(sizes) if name.kind is Kind.model else [file for file in sizes if file == "README.md"]
    _write(record, complete=False, files=first)
    if not wanted.commit:
        _remember(folder, name, commit)
    _get(folder, wanted, commit, {file: sizes[file] for file in first}, say)
    rest = _rest(directory, wanted, sizes)
    _get(folder, wanted, commit, {file: sizes[file] for file in rest}, say)
    _write(record, complete=True, files=[*first, *rest])
    return Found(directory=directory, commit=commit)


def _remember(folder: Path, name: HubName, commit: str) -> None:
    """What the revision stands for, so that the next process need not ask."""
    if not name.is_pinned:
        ref = folder / "refs" / (name.revision or "main")
        ref.parent.mkdir(parents=True, exist_ok=True)
        publish(ref, lambda new: new.write_text(commit))


def _small(sizes: dict[str, int]) -> list[str]:
    return sorted(file for file in sizes if "/" not in file and file.endswith(_SMALL))


def _rest(directory: Path, wanted: Wanted, sizes: dict[str, int]) -> list[str]:
    """The large files, known once the small ones are here. Raises ConfigError for a repository without any of use."""
    if wanted.files is Files.settings:
        return []
    if wanted.files is Files.data:
        if rest := sorted(file for file in sizes if file.endswith(_DATA) and not any(part.startswith(".") for part in file.split("/"))):
            return rest
        raise ConfigError(f"{wanted.text}: the data set has no file ending in .parquet, .jsonl, .json, .csv, .txt or .arrow")
    rest = _shards(directory / INDEX) if INDEX in sizes else [file for file in WEIGHTS if file in sizes][:1]
    if not rest:
        has = sorted({Path(file).suffix for file in sizes if file.endswith((".bin", ".pt", ".pth", ".gguf"))})
        others = f"; its {', '.join(has)} files are not read" if has else ""
        raise ConfigError(f"{wanted.text}: the model has no safetensors weights ({' or '.join((INDEX, WEIGHTS[0]))}){others}")
    if missing := [file for file in rest if file not in sizes]:
        raise ConfigError(f"{wanted.text}: its {INDEX} names {missing[0]}, which the repository does not have")
    return rest


def _write(record: Path, *, complete: bool, files: Sequence[str]) -> None:
    publish(record, lambda new: new.write_text(json.dumps({"complete": complete, "files": list(files)}) + "\n"))


def _get(folder: Path, wanted: Wanted, commit: str, sizes: dict[str, int], say: Callable[[str], object]) -> None:
    """Download the files that the snapshot lacks, several at a time; says how far it is."""
    missing = {file: size for file, size in sizes.items() if not (folder / "snapshots" / commit / file).is_file()}
    if not missing:
        return
    before, total = _stored(folder), sum(missing.values())
    if (free := shutil.disk_usage(folder).free) < total:
        raise AlignerError(
            f"{wanted.text}: {total / 2**30:.2f} GiB are to be downloaded to {folder}, and {free / 2**30:.2f} GiB are free there: "
            "make space, or name another cache with HF_HOME"
        )
    say(f"{wanted.text}: downloading {len(missing)} files, {_size(total)}, of commit {commit} to {folder}")

    def get(file: str) -> None:
        hf_hub_download(wanted.name.repo, file, repo_type=wanted.name.kind.value, revision=commit, endpoint=endpoint())

    pool = ThreadPoolExecutor(_NUM_WORKERS)
    try:
        with _without_bars():
            running = {pool.submit(get, file) for file in missing}
            while running:
                done, running = wait(running, timeout=_SECONDS_BETWEEN_LINES, return_when="FIRST_EXCEPTION")
                for one in done:
                    one.result()
                have = min(total, max(0, _stored(folder) - before)) if running else total
                say(f"{wanted.text}: {_size(have)} of {_size(total)} downloaded ({100 * have // max(total, 1)} %)")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error the other files' threads are not waited for


@contextmanager
def _without_bars() -> Iterator[None]:
    """Bars of huggingface_hub show nothing in a log, and several at once on a terminal."""
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _stored(folder: Path) -> int:
    """Bytes of all files, also of those under way."""
    total = 0
    if (folder / "blobs").is_dir():
        for entry in os.scandir(folder / "blobs"):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:  # it got its name meanwhile
                continue
    return total


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
