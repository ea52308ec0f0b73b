"""Which code of a user's this process is calling, in a file: where native code crashes, nothing else names it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_SIZE = 1024  # bytes of the file: its room is taken at the start, and a call is one write into the page cache


class _Record:
    """The process's own: it is the process that dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._descriptor: int | None = None

    def open(self, path: Path) -> None:
        """From now on what this process calls is in that file. Raises OSError."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.pwrite(self._descriptor, b" " * _SIZE, 0)

    def count(self, what: str, by: int) -> None:
        with self._lock:
            self._running[what] += by
            if self._descriptor is not None:
                text = "; ".join(sorted(name for name, calls in self._running.items() if calls > 0))
                with contextlib.suppress(OSError):  # it is for a message only: no reason to fail a call
                    os.pwrite(self._descriptor, text.encode()[:_SIZE].ljust(_SIZE), 0)


_OWN = _Record()


record_in = _OWN.open


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Meanwhile this process calls `what` (`reward function file.py:name`). From any thread."""
    _OWN.count(what, 1)
    try:
        yield
    finally:
        _OWN.count(what, -1)


def was_calling(path: Path) -> str:
    """What a process that recorded itself in `path` was calling when it ended; empty where nothing, or nothing is known."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""
