"""Runs checks while the main thread computes, and ends the process if the main thread does not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

CHECK_SECONDS = 0.5


class Supervisor:
    """A thread that runs `checks` twice a second; each returns what is wrong, or None.

    After the first failure the main thread has `grace_seconds` to end in order (it sees `failure()` between operations). If it hangs, in a
    collective whose peer is gone for example, `last_words(message)` is called and the process exits with status 1.
    """

    def __init__(self, checks: Sequence[Callable[[], str | None]], *, grace_seconds: float, last_words: Callable[[str], None]) -> None:
        self._checks = checks
        self._grace_seconds = grace_seconds
        self._last_words = last_words
        self._ended = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="server-supervisor", daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        """The first thing that went wrong."""
        return self._failure

    def report(self, failure: str) -> None:
        """The main thread has failed and is ending: its time is limited from now on."""
        self._failure = self._failure or failure

    def close(self) -> None:
        """The main thread has ended by itself: do not interfere any more."""
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._ended.wait(CHECK_SECONDS):
            self._failure = self._failure or next(filter(None, map(self._ask, self._checks)), None)
            if self._failure:
                break
        if self._failure is None or self._ended.wait(self._grace_seconds):
            return
        print(f"server: {self._failure}; the main thread did not end in {self._grace_seconds:.0f} s, exiting", file=sys.stderr, flush=True)
        self._last_words(self._failure)
        os._exit(1)

    def _ask(self, check: Callable[[], str | None]) -> str | None:
        try:
            return check()
        except Exception as error:  # a check that cannot be made is itself a failure, for example of the store's connection
            return f"supervision failed: {type(error).__name__}: {error}"
