"""What this process does when, in a file of its run: the spans that `aligner trace` puts together.

    <run>/trace/<component>.<rank>.jsonl         the newest spans, a JSON object each
    <run>/trace/<component>.<rank>.older.jsonl   those before; replaced when the newest ones have half of the room

Spans are timed with a monotonic clock and written in seconds since 1970. They wait in memory until `flush`; a process that is killed loses
them. Writing never fails a run.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from io import SEEK_END
from pathlib import Path

from aligner.telemetry.spans import Span

_ENCODER = json.JSONEncoder(default=str, separators=(",", ":"))  # json.dumps would make one for every span
MOST_WAITING = 4096  # spans in memory: a step may have tens of thousands of requests
_OLDER = ".older.jsonl"

_Entry = tuple[str, str, float, float, Mapping[str, object]]  # name, lane, start and seconds on this process's clock, arguments


class Recorder:
    """Records into one file. `add` and `flush` may be called by any thread; nothing is recorded before `open` and after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the file
        self._waiting: deque[_Entry] = deque()
        self._path: Path | None = None
        self._most_bytes = 0
        self._warned = False
        self.rank = 0

    def is_on(self) -> bool:
        return self._path is not None

    def rank_lane(self, what: str = "") -> str:
        """The lane of this rank, or of something that it does beside its main thread."""
        return f"rank {self.rank} {what}".rstrip()

    def open(self, path: Path, *, rank: int, most_bytes: int) -> None:
        """Record in this file from now on, behind what it has; it and the older one have `most_bytes` together. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.seek(0, SEEK_END):
                file.seek(-1, SEEK_END)
                if file.read(1) != b"\n":  # a process was killed while it wrote
                    file.write(b"\n")
        self._waiting.clear()
        self._path, self._most_bytes, self._warned, self.rank = path, most_bytes, False, rank

    def close(self) -> None:
        """Write what waits, and record nothing more."""
        self.flush()
        self._path = None

    def add(self, name: str, start: float, lane: str = "", **arguments: object) -> None:
        """A span from `start` (of `time.perf_counter`) until now. `lane` "": this rank's."""
        if self._path is None:
            return
        self._waiting.append((name, lane or self.rank_lane(), start, time.perf_counter() - start, arguments))
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "", **arguments: object) -> Iterator[dict[str, object]]:
        """Record the block as a span, also if it raises. Yields the arguments, to which the block may add."""
        start = time.perf_counter()
        try:
            yield arguments
        finally:
            self.add(name, start, lane, **arguments)

    def flush(self) -> None:
        """Write what waits. A file system in trouble costs spans, and one warning."""
        if self._path is None or not self._waiting:
            return
        with self._lock:
            offset = time.time() - time.perf_counter()
            lines = [_line(self._waiting.popleft(), offset) for _ in range(len(self._waiting))]  # others may add meanwhile
            try:
                self._write(self._path, "".join(lines).encode())
            except OSError as error:
                if not self._warned:
                    print(f"warning: {len(lines)} spans of the trace are lost: {self._path}: {error}", file=sys.stderr, flush=True)
                self._warned = True

    def _write(self, path: Path, data: bytes) -> None:
        if path.exists() and path.stat().st_size + len(data) > self._most_bytes // 2:
            path.replace(path.with_suffix(_OLDER))
        with path.open("ab", buffering=0) as file:
            file.write(data)


def _line(entry: _Entry, offset: float) -> str:
    name, lane, start, seconds, arguments = entry
    record: dict[str, object] = {"start": round(start + offset, 6), "seconds": round(seconds, 6), "name": name, "lane": lane}
    if arguments:
        record["arguments"] = arguments
    return _ENCODER.encode(record) + "\n"


_OWN = Recorder()  # the process's
record_in, close, flush, is_on, rank_lane, add, span = _OWN.open, _OWN.close, _OWN.flush, _OWN.is_on, _OWN.rank_lane, _OWN.add, _OWN.span


def read_spans(directory: Path) -> tuple[list[Span], int]:
    """What all processes of a run recorded in this folder, by component and start (seconds since 1970); and the number of damaged lines."""
    found: dict[str, list[Span]] = {}
    num_damaged = 0
    for path in sorted(directory.glob("*.jsonl")):
        component = path.name.split(".")[0]
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                found.setdefault(component, []).append(Span(component=component, **record))
            except (ValueError, TypeError):
                num_damaged += bool(line.strip())
    return [one for name in sorted(found) for one in sorted(found[name], key=lambda one: (one.start, -one.seconds))], num_damaged
