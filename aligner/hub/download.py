"""From a name of the Hub to a directory: the local cache's if it holds everything that is needed, else after a download.

All tools of Hugging Face share the cache (HF_HOME, HF_HUB_CACHE). Its snapshots do not record whether they are complete, so we keep a
record of our own beside them, `aligner/<commit>.<files>.json`, written before a download begins and again when it is complete. A snapshot
without a record counts as complete if the model's index agrees. One process at a time downloads a repository into a cache, under a lock
file there; the others wait and then find it. Errors name, in one line, the way out.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token, snapshot_download
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.files import is_plain_name, locked, publish
from aligner.hub.names import Files, HubName, Kind, parse

CARD = "README.md"
OPTION = "--push-to-hub"
_PARTS = (".json", ".safetensors", ".jinja", ".model", "merges.txt")  # the files of an export; never pickles or checkpoints
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SMALL = (".json", ".jinja", ".model", "merges.txt")  # files of a model beside its weights; none is a pickle or code
_DATA = tuple(
    f".{kind}{packed}"
    for kind in ("parquet", "jsonl", "json", "csv", "tsv", "txt", "arrow")
    for packed in ("", ".gz", ".zst", ".xz", ".bz2")
)
_SECONDS_BETWEEN_LINES = 10.0
_POLL_SECONDS = 0.5
WAIT_SECONDS = 3600.0
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")
_LOG_IN = "set HF_TOKEN, or run `hf auth login`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A setting's request to the Hub."""

    key: str  # of the setting, for messages
    name: HubName
    files: Files = Files.model
    commit: str = ""  # the commit that the run has used so far; empty: whatever the revision is now
    wait_seconds: float = WAIT_SECONDS  # for another process that downloads the same repository

    @property
    def text(self) -> str:
        return f"{self.key}={self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A repository's directory in the cache, and its commit."""

    directory: Path
    commit: str


def fetch(wanted: Wanted, say: Callable[[str], object]) -> Found:
    """The directory with the files, downloaded if the cache lacks them. `say` prints a line of progress.

    Raises ConfigError for an unknown name or revision or a missing permission; AlignerError without a network or disk space, or if another
    process downloads for longer than `wait_seconds`.
    """
    folder = Path(constants.HF_HUB_CACHE) / wanted.name.folder
    if found := _in_cache(folder, wanted):
        return found
    if constants.HF_HUB_OFFLINE:
        return _offline(folder, wanted, say)
    with _explained(wanted.text, wanted.name):
        (folder / "aligner").mkdir(parents=True, exist_ok=True)
        with _alone(folder, wanted, say):
            return _in_cache(folder, wanted) or _download(folder, wanted, say)


def _known_commit(folder: Path, wanted: Wanted) -> str:
    """The requested commit, as far as this machine knows; empty if unknown."""
    if wanted.commit or wanted.name.is_pinned:
        return wanted.commit or wanted.name.revision
    ref = folder / "refs" / (wanted.name.revision or "main")
    return ref.read_text().strip() if ref.is_file() else ""


def _in_cache(folder: Path, wanted: Wanted) -> Found | None:
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
    """Whether a snapshot without a record has the config and, if required, all weights."""
    if not (directory / "config.json").is_file():
        return False
    if files is Files.settings or (directory / WEIGHTS[0]).is_file():
        return True
    return (directory / INDEX).is_file() and all((directory / file).is_file() for file in _shards(directory / INDEX))


def _shards(index: Path) -> list[str]:
    return sorted({_inside(file, index) for file in json.loads(index.read_text()).get("weight_map", {}).values()})


def _inside(file: str, where: object) -> str:
    """A file name from the Hub or a downloaded index. Raises ConfigError if it leads out of the folder."""
    if not all(map(is_plain_name, file.split("/"))):
        raise ConfigError(f"{where}: names the file {file!r}; allowed: files inside the folder")
    return file


def _offline(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> Found:
    commit = _known_commit(folder, wanted)
    directory = folder / "snapshots" / commit
    has_tokenizer = any((directory / file).is_file() for file in TOKENIZERS)
    begun = commit and _read(_record(folder, commit, wanted.files)) is not None  # and not complete: `_in_cache` would have found it
    if begun:
        what = f"{directory} is not complete"
    elif not commit or not directory.is_dir():
        what = f"the cache {folder.parent} does not have {'that' if wanted.name.revision or wanted.commit else 'it'}"
    elif wanted.files is Files.data:
        if any(file.name.endswith(_DATA) for file in directory.rglob("*")):
            say(f"warning: {wanted.text}: offline: cannot check whether {directory} has all of its files")
            return Found(directory=directory, commit=commit)
        what = f"{directory} has no data files"
    elif _looks_whole(directory, wanted.files) or (wanted.files is Files.settings and has_tokenizer):
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


def _record(folder: Path, commit: str, files: Files) -> Path:
    return folder / "aligner" / f"{commit}.{files.value}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError:
        return {"complete": False, "files": []}


def _alone(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> AbstractContextManager[None]:
    path, polls = folder / "aligner" / "lock", count()

    def waiting(seconds: float) -> None:
        if seconds >= wanted.wait_seconds:
            raise AlignerError(
                f"{wanted.text}: waited {seconds:.0f} s for another process, which downloads it to {folder} and holds {path}"
            ) from None
        if not next(polls):
            say(f"{wanted.text}: waiting for another process, which downloads it to {folder}")

    return locked(path, waiting, min(_POLL_SECONDS, wanted.wait_seconds))


def _download(folder: Path, wanted: Wanted, say: Callable[[str], object]) -> Found:
    name, api = wanted.name, HfApi(endpoint=constants.ENDPOINT)
    asked = wanted.commit or name.revision or "main"
    info = api.repo_info(name.repo, repo_type=name.kind.value, revision=asked, files_metadata=True)
    commit = str(info.sha)
    sizes = {_inside(one.rfilename, wanted.text): int(one.size or 0) for one in info.siblings or []}
    directory, record = folder / "snapshots" / commit, _record(folder, commit, wanted.files)
    first = sorted(file for file in sizes if "/" not in file and file.endswith(_SMALL))
    if name.kind is not Kind.model:
        first = [file for file in sizes if file == "README.md"]
    _write(record, complete=False, files=first)
    if not wanted.commit and not name.is_pinned:  # so that the next process need not ask
        ref = folder / "refs" / (name.revision or "main")
        ref.parent.mkdir(parents=True, exist_ok=True)
        publish(ref, lambda new: new.write_text(commit))
    _get(folder, wanted, commit, {file: sizes[file] for file in first}, say)
    rest = _rest(directory, wanted, sizes)
    _get(folder, wanted, commit, {file: sizes[file] for file in rest}, say)
    _write(record, complete=True, files=[*first, *rest])
    return Found(directory=directory, commit=commit)


def _rest(directory: Path, wanted: Wanted, sizes: dict[str, int]) -> list[str]:
    """The large files, known once the small ones are here. Raises ConfigError if none is usable."""
    if wanted.files is Files.settings:
        return []
    if wanted.files is Files.data:
        if rest := sorted(file for file in sizes if file.endswith(_DATA) and not any(part.startswith(".") for part in file.split("/"))):
            return rest
        raise ConfigError(f"{wanted.text}: the data set has no file ending in .parquet, .jsonl, .json, .csv, .txt or .arrow")
    rest = _shards(directory / INDEX) if INDEX in sizes else [file for file in WEIGHTS if file in sizes][:1]
    if not rest:
        has = sorted({Path(file).suffix for file in sizes if file.endswith((".bin", ".pt", ".pth", ".gguf"))})
        others = f"; its {', '.join(has)} files are not supported" if has else ""
        raise ConfigError(f"{wanted.text}: the model has no safetensors weights ({' or '.join((INDEX, WEIGHTS[0]))}){others}")
    if missing := [file for file in rest if file not in sizes]:
        raise ConfigError(f"{wanted.text}: its {INDEX} names {missing[0]}, which the repository lacks")
    return rest


def _write(record: Path, *, complete: bool, files: Sequence[str]) -> None:
    publish(record, lambda new: new.write_text(json.dumps({"complete": complete, "files": list(files)}) + "\n"))


def _get(folder: Path, wanted: Wanted, commit: str, sizes: dict[str, int], say: Callable[[str], object]) -> None:
    """Download the files that the snapshot lacks, several at a time, and report progress."""
    directory = folder / "snapshots" / commit
    if not (missing := {file: size for file, size in sizes.items() if not (directory / file).is_file()}):
        return
    before, total = _stored(folder), sum(missing.values())
    if (free := shutil.disk_usage(folder).free) < total:
        raise AlignerError(
            f"{wanted.text}: {total / 2**30:.2f} GiB are to be downloaded to {folder}, and {free / 2**30:.2f} GiB are free there: "
            "make space, or name another cache with HF_HOME"
        )
    say(f"{wanted.text}: downloading {len(missing)} files, {_size(total)}, of commit {commit} to {folder}")
    request = {"repo_type": wanted.name.kind.value, "revision": commit, "endpoint": constants.ENDPOINT}
    pool, shows_bars = ThreadPoolExecutor(1), not are_progress_bars_disabled()
    disable_progress_bars()  # useless in a log
    try:
        running = pool.submit(snapshot_download, wanted.name.repo, **request, allow_patterns=[glob.escape(file) for file in missing])
        while wait([running], timeout=_SECONDS_BETWEEN_LINES).not_done:
            have = min(total, max(0, _stored(folder) - before))
            say(f"{wanted.text}: {_size(have)} of {_size(total)} downloaded ({100 * have // max(total, 1)} %)")
        running.result()
    finally:
        pool.shutdown(wait=False)
        if shows_bars:
            enable_progress_bars()
    if lost := [file for file in missing if not (directory / file).is_file()]:  # where the Hub fails, an incomplete folder may be returned
        raise AlignerError(f"{wanted.text}: {constants.ENDPOINT} did not send {lost[0]} of commit {commit}; try again")
    say(f"{wanted.text}: {_size(total)} of {_size(total)} downloaded (100 %)")


def _stored(folder: Path) -> int:
    total = 0
    for file in (folder / "blobs").glob("*"):
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_size
    return total


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@contextmanager
def _explained(text: str, name: HubName) -> Iterator[None]:
    """Errors of huggingface_hub become ours. `text`: the setting as typed."""
    try:
        yield
    except AlignerError:
        raise
    except Exception as error:
        raise _explain(error, text, name) from error


def _explain(error: Exception, text: str, name: HubName) -> AlignerError:
    endpoint, cache, has_token = constants.ENDPOINT, Path(constants.HF_HUB_CACHE) / name.folder, bool(get_token())
    here, kind = f"{endpoint}/{name.repo}", name.kind.value
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        mend = f"ask for access at {here} with the account of this token" if has_token else f"accept its terms at {here} and {_LOG_IN}"
        return ConfigError(f"{text}: the {kind} is gated, and {'this token may not read it' if has_token else 'no token is set'}: {mend}")
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "or this token may not read it" if has_token else f"or it is private: {_LOG_IN}"
        return ConfigError(f"{text}: no such directory here, and {endpoint} has no {kind} {name.repo}, {private}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{text}: {here} has no branch, tag or commit {name.revision or 'main'}")
    if status in (401, 403):
        return ConfigError(f"{text}: {endpoint} refuses the token ({status}): {_LOG_IN}, with a token that may do this")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{text}: no such directory here, and not a valid name of a {kind} on {endpoint}: {_first_line(error)}")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return ConfigError(f"{text}: {here} lacks a file that it lists: {_first_line(error)}")
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        return AlignerError(f"{text}: {endpoint} answered {status}: {_first_line(error)}")
    storage = isinstance(error, OSError) and is_storage_error(error)
    unanswered = isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError))
    if not storage and (unanswered or any(base.__module__.partition(".")[0] in _TRANSPORTS for base in type(error).__mro__)):
        cause: BaseException = error  # huggingface_hub's own error names none
        while (earlier := cause.__cause__ or cause.__context__) is not None and isinstance(cause, errors.LocalEntryNotFoundError):
            cause = earlier
        return AlignerError(
            f"{text}: no such directory here, {cache.parent} lacks some of it, and {endpoint} cannot be reached "
            f"({type(cause).__name__}: {_first_line(cause)}): download it where there is a network, or set HTTPS_PROXY or HF_ENDPOINT"
        )
    if isinstance(error, OSError) and storage:
        return AlignerError(f"{text}: {describe_os_error(error, cache)}: make space, or name another cache with HF_HOME")
    return AlignerError(f"{text}: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Uploads: one commit with the files of an export and its card.


def prepare(text: str) -> HubName:
    """The repository of this name, created (private) if missing. Raises what would refuse a push: ConfigError, AlignerError."""
    name = parse(text)
    if name is None:
        is_here = " (there is a file or directory of that name)" if Path(text).exists() else ""
        raise ConfigError(f"{OPTION} {text}: is not a valid repository name{is_here}; allowed: ORG/NAME")
    if name.revision:
        raise ConfigError(f"{OPTION} {text}: a push goes to the main branch; allowed: ORG/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{OPTION} {text}: HF_HUB_OFFLINE forbids it")
    if not get_token():
        raise ConfigError(f"{OPTION} {text}: no token is set: set HF_TOKEN to one that may write, or run `hf auth login`")
    _asked(name, lambda api: api.create_repo(name.repo, private=True, exist_ok=True))
    return name


def push(directory: Path, name: HubName, *, card: str, message: str) -> str:
    """Upload the export in `directory`, with this card or its own, as one commit; returns its address. Raises as `prepare`."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name.endswith(_PARTS))
    own = directory / CARD
    operations = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file)) for file in files]
    operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=own.read_bytes() if own.is_file() else card.encode()))
    info = _asked(name, lambda api: api.create_commit(name.repo, operations=operations, commit_message=message))
    return str(info.commit_url)


def _asked(name: HubName, ask: Callable[[HfApi], object]) -> object:
    with _explained(f"{OPTION} {name}", name):
        return ask(HfApi(endpoint=constants.ENDPOINT))
