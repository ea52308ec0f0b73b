"""Tokenized data that later runs find again (`data.cache`): made by several processes, once per machine, read from memory-mapped files.

    <cache>/<key>/manifest.json    sizes and digests of the other files (`aligner.data.stored`), and the report
    <cache>/<key>.lock             held by the process that makes it; the others wait
    <cache>/digests/               digests of data files, by path, size and times
    <cache>/images/                the images of all entries, by digest; a run's directory gets those that it lacks

The key is a digest of everything that the examples depend on: the data files' bytes, the tokenizer's files, the settings and the code that
reads; where records name files of images, also these files' sizes and times. A directory gets its name only once all of it is on disk, so
two machines may make it at the same time: the first one counts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from functools import partial
from importlib.metadata import version
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from aligner.data.images import stamp_of
from aligner.data.report import STORING, LoadReport, LongRecord, Tally
from aligner.data.sources import data_files, parted, saved_by_datasets
from aligner.data.stored import BLOCKS, COUNTS, NotStorable, ShardWriter, StoredExamples, schema_of, write_index
from aligner.data.tokenizer import Tokenizer
from aligner.data.vision import Vision
from aligner.errors import AlignerError, ConfigError, DataError, describe_os_error
from aligner.files import locked, publish
from aligner.hub.names import DATASETS_PREFIX
from aligner.types.extras import read_from_records

FORMAT = 1
MANIFEST, IMAGES = "manifest.json", "images"
BLOCK_SIZE = 1024  # records that one process converts at a time
MAX_WORKERS = 16
WAIT_SECONDS = 6 * 3600.0  # for another process that makes the same directory
# Settings that no example depends on.
_APART = frozenset("train validation mixture_temperature cache num_workers num_validation_prompts".split())
_TOKENIZER_FILES = ("*token*.json", "*.model", "*.jinja", "vocab.*", "merges.txt")
_CHUNK = 2**24
Heartbeat = Callable[[], None]


def load_cached(
    load: Any, kind: type, location: str, config: Any, tokenizer: Tokenizer, *, heartbeat: Heartbeat, **options: Any
) -> tuple[Sequence[Any], LoadReport]:
    """What `load` returns, with the examples in files of the cache, made if they are missing. `heartbeat` is called meanwhile.

    Raises what `load` raises; ConfigError for examples that cannot be kept, or a directory that cannot be written.
    """
    cache, vision = Path(config.cache), tokenizer.vision
    try:
        schema_of(kind)
        (cache / "digests").mkdir(parents=True, exist_ok=True)
        directory = cache / _key(kind, location, config, tokenizer, options, heartbeat)
        lock, seeing = cache / f"{directory.name}.lock", tokenizer.seeing(vision and vision.storing(cache / IMAGES))
        if (found := _open(_entry(directory), kind)) is None:
            _ = vision and vision.failure  # loads the processor once, not in every process
            with _alone(lock, heartbeat):
                if (found := _open(_entry(directory), kind)) is None:
                    workers = config.num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
                    making = _Storing(cache / f".{directory.name}.{uuid.uuid4().hex[:8]}", kind, workers, heartbeat)
                    _make(making, directory, lambda: load(location, config, seeing, **options)[1])
                    found = _open(_entry(directory), kind)
        if vision is not None:
            with _alone(lock, heartbeat):
                _hand_over(_entry(directory), vision, heartbeat)
    except NotStorable as error:
        raise ConfigError(f"data.cache: examples of type {kind.__name__} cannot be kept ({error}); allowed: ''") from error
    except OSError as error:
        raise ConfigError(f"data.cache={config.cache}: {describe_os_error(error, cache)}") from error
    if found is None:
        raise DataError(f"data.cache={config.cache}: {directory} was damaged while it was written")
    return found


def _open(directory: Path, kind: type) -> tuple[StoredExamples[Any], LoadReport] | None:
    """The examples and the report of a complete directory; None if it is missing, half-written or damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if any((directory / name).stat().st_size != size for name, size in manifest["files"].items()):
            return None
        if any(_digest(directory / name) != manifest["digests"][name] for name in (BLOCKS, COUNTS)):
            return None
        report = manifest["report"]
        report["too_long"] = tuple(LongRecord(**one) for one in report["too_long"])
        return StoredExamples(directory, kind), LoadReport(**report | {"problems": tuple(report["problems"]), "parts": ()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entry(directory: Path) -> Path:
    """The directory itself, or the one whose examples were made of the files of images as they are now."""
    try:
        paths = json.loads((directory.parent / "digests" / f"{directory.name}.{IMAGES}").read_text())
    except FileNotFoundError:
        return directory
    return _stamped(directory, [(path, stamp_of(Path(path))) for path in paths])


def _stamped(directory: Path, stamps: Sequence[tuple[str, list[int]]]) -> Path:
    return directory.with_name(
        f"{directory.name}-{hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:12]}" if stamps else directory.name
    )


def _hand_over(entry: Path, vision: Vision, heartbeat: Heartbeat) -> None:
    """Put the images of an entry into a run's store, once. Raises DataError if the cache has lost one, ConfigError if none may be used."""
    store = vision.store
    done = store.directory / f".{entry.name}"
    if not (listed := entry / f"{IMAGES}.json").exists():
        return
    if vision.refusal:
        raise ConfigError(vision.refusal)
    if done.exists():
        return
    for digest in json.loads(listed.read_text()):
        if not store.take(entry.parent / IMAGES / digest):
            raise DataError(f"{entry.parent / IMAGES / digest} is missing; remove {entry}, and it will be made again (data.cache)")
        heartbeat()
    done.touch()


def _make(storing: _Storing, directory: Path, load: Callable[[], LoadReport]) -> None:
    """Make the directory, unless another machine was faster."""
    for left in directory.parent.glob(f".{directory.name}.*"):  # by dead processes; another machine may write one if locks are not shared
        if time.time() - max(path.stat().st_mtime for path in (left, *left.iterdir())) > WAIT_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    new = storing.directory
    new.mkdir()
    token = STORING.set(storing)
    try:
        report = load()
        if digests := sorted({digest for digest, _, _ in storing.images if digest}):
            (new / f"{IMAGES}.json").write_text(json.dumps(digests))
        if stamps := sorted({path: (path, stamp) for _, path, stamp in storing.images if path}.values()):
            paths = json.dumps([path for path, _ in stamps])
            publish(directory.parent / "digests" / f"{directory.name}.{IMAGES}", lambda path: path.write_text(paths))
        directory = _stamped(directory, stamps)
        files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        manifest = {
            "format": FORMAT,
            "files": files,
            "digests": {name: _digest(new / name) for name in (BLOCKS, COUNTS)},
            "report": asdict(report),
        }
        publish(new / MANIFEST, lambda path: path.write_text(json.dumps(manifest) + "\n"))
        if _open(directory, storing.kind) is None:
            shutil.rmtree(directory, ignore_errors=True)  # damaged
            os.rename(new, directory)
    finally:
        STORING.reset(token)
        shutil.rmtree(new, ignore_errors=True)


def _key(kind: type, location: str, config: Any, tokenizer: Tokenizer, options: dict[str, Any], heartbeat: Heartbeat) -> str:
    settings = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in _APART}
    named = [value for value in settings.values() if isinstance(value, str) and value and Path(value).is_file()]
    code = sorted(Path(__file__).parent.glob("*.py"))
    own = sorted({path for pattern in _TOKENIZER_FILES for path in Path(tokenizer.path).glob(pattern)})
    made_of = {
        "format": FORMAT,
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "code": [[path.name, _digest(path)] for path in code],
        "packages": [version("tokenizers"), version("transformers")],
        "location": location,
        "options": {name: sorted(value) if isinstance(value, frozenset) else value for name, value in options.items()},
        "files": [[str(path), _known_digest(path, Path(config.cache), heartbeat)] for path in _files(location)],
        "templates": tokenizer.chat_digest,
        "tokenizer": [tokenizer.digest, *([path.name, _digest(path)] for path in own)],
        "settings": {name: value.name if isinstance(value, Enum) else value for name, value in settings.items()},
        "named": [_digest(Path(value)) for value in named],
    }
    if tokenizer.vision is not None:
        patterns = ("*processor*.json", "config.json", *_TOKENIZER_FILES)
        sees = sorted({path for pattern in patterns for path in tokenizer.vision.directory.glob(pattern)})
        made_of["vision"] = [version("pillow"), *([path.name, _digest(path)] for path in sees)]
    if extras := read_from_records():
        made_of["extras"] = [[kind.name, _digest(Path(inspect.getfile(kind)))] for kind in extras]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _files(location: str) -> list[Path]:
    """The files of a data set. Raises ConfigError if it has no local files."""
    path = Path(parted(location)[0])
    if location.startswith(DATASETS_PREFIX):
        path = Path(location[len(DATASETS_PREFIX) :].partition(":")[0])
        if not path.exists():
            raise ConfigError(
                f"data.cache: {location!r} names no local files, whose bytes could be compared; allowed: a path, or data.cache=''"
            )
    if path.is_dir() and (location.startswith(DATASETS_PREFIX) or saved_by_datasets(path)):
        return sorted(one for one in path.rglob("*") if one.is_file())
    return data_files(location)


def _digest(path: Path, heartbeat: Heartbeat = lambda: None) -> str:
    content = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            content.update(chunk)
            heartbeat()
    return content.hexdigest()


def _known_digest(path: Path, cache: Path, heartbeat: Heartbeat) -> str:
    """The digest of a data file; it is read again only if its size or times have changed. Raises DataError if the file is missing."""
    if not path.is_file():
        raise DataError(f"data file {str(path)!r} does not exist (looked for {path.absolute()})")
    place = cache / "digests" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    with _alone(place.with_suffix(".lock"), heartbeat):
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        try:
            known = json.loads(place.read_text())
            if known["stamp"] == stamp:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        found = _digest(path, heartbeat)
        if time.time() - max(status.st_mtime, status.st_ctime) > 2:  # the times of a newer file may not show a later change
            publish(place, lambda new: new.write_text(json.dumps({"stamp": stamp, "sha256": found})))
        return found


def _alone(path: Path, heartbeat: Heartbeat) -> AbstractContextManager[None]:
    """Meanwhile no other process of this machine is in such a block."""

    def waiting(seconds: float) -> None:
        heartbeat()
        if seconds >= WAIT_SECONDS:
            waited = f"waited {WAIT_SECONDS / 3600:.0f} hours for another process, which tokenizes the data and holds {path}"
            raise DataError(f"data.cache: {waited}") from None

    return locked(path, waiting)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A worker's result: its part of the index, its tally, and the lengths of the tally's lists after each block."""

    blocks: list[tuple[int, int, int, int, int]]
    counts: list[Any]
    tally: Tally
    marks: list[dict[str, int]]


@dataclass(frozen=True, slots=True)
class _Storing:
    """`aligner.data.report.Storing`: converts in several processes, which take turns at blocks of records, and writes the examples."""

    directory: Path
    kind: type
    num_workers: int
    heartbeat: Heartbeat
    images: list[tuple[str, str, list[int]]] = field(default_factory=list)  # that were read: `ImageReader.files`

    def convert(self, tally: Tally, items: Iterable[Any], conversion: Any, records: Any) -> StoredExamples[Any]:
        """`Tally.convert`, its examples in files. Raises what reading the items raises, and DataError if a process is killed."""
        work = partial(self._work, tally, items, conversion, records)
        if self.num_workers == 1:
            outcomes = [work(0)]
        else:
            outcomes = _in_processes(work, self.num_workers, self.heartbeat)
            tally.absorb([one.tally for one in outcomes], [one.marks for one in outcomes])
        self.images.extend(tally.images)
        places = [divmod(block, self.num_workers) for block in range(sum(len(one.blocks) for one in outcomes))]
        blocks, counts = ([getattr(outcomes[worker], name)[nth] for nth, worker in places] for name in ("blocks", "counts"))
        write_index(self.directory, blocks, counts)
        return StoredExamples(self.directory, self.kind)

    def _work(self, tally: Tally, items: Iterable[Any], conversion: Any, records: Any, number: int) -> _Outcome:
        """Every `num_workers`-th block, from block `number` on. In a process of its own the tally is a copy."""
        writer = ShardWriter(self.directory, number, self.kind)
        marks: list[dict[str, int]] = []
        parent, iterator, block = os.getppid(), iter(items), 0
        while taken := list(islice(iterator, BLOCK_SIZE)):
            if block % self.num_workers == number:
                writer.write(tally.convert_here(taken, conversion, records))
                marks.append(tally.listed())
            if self.num_workers == 1:
                self.heartbeat()
            elif os.getppid() != parent:
                raise DataError("the process that started this one has ended")
            block += 1
        writer.close()
        return _Outcome(writer.blocks, writer.counts, tally, marks)


def _in_processes(work: Callable[[int], _Outcome], num: int, heartbeat: Heartbeat) -> list[_Outcome]:
    """`work(number)` in `num` copies of this process. Raises the first error of one, and DataError if one is killed."""
    context, found = multiprocessing.get_context("fork"), dict[int, _Outcome]()
    ends: dict[Connection, int] = {}
    processes = []
    try:
        for number in range(num):
            end, childs = context.Pipe(duplex=False)
            ends[end] = number
            processes.append(context.Process(target=_child, args=(work, number, childs), daemon=True))
            processes[-1].start()
            childs.close()
        while ends:
            for end in wait(list(ends), timeout=1.0):
                number = ends.pop(end)  # type: ignore[call-overload]
                found[number] = _received(end, processes[number])
            heartbeat()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return [found[number] for number in range(num)]


def _child(work: Callable[[int], _Outcome], number: int, end: Connection) -> None:
    torch.set_num_threads(1)  # image processors may use OpenMP, which does not survive a fork
    try:
        end.send(work(number))
    except AlignerError as error:
        end.send((type(error), str(error)))
    except Exception:
        end.send((RuntimeError, traceback.format_exc()))


def _received(end: Connection, process: Any) -> _Outcome:
    try:
        outcome = end.recv()
    except EOFError:
        process.join()
        raise DataError(f"data.cache: a process that tokenized ended with exit code {process.exitcode}: killed, for memory?") from None
    if isinstance(outcome, _Outcome):
        return outcome
    kind, text = outcome
    raise kind(text)
