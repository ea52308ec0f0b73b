"""The health of a server: whether its loop reaches all ranks, and what it does now.

A `Supervisor` watches what the main thread cannot while it computes, and ends the process if the main thread does not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aligner.servers.config import ServerConfig


class Pulse:
    """When all ranks last finished a round together, and the operation that runs. Written by rank 0's main thread, read by others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._round_at: float | None = None
        self._operation_ended_at: float | None = None
        self._operation: tuple[str, float] | None = None

    def begin(self, operation: str | None) -> None:
        """All ranks start on `operation`, or on the no-op."""
        with self._lock:
            self._operation = None if operation is None else (operation, self._clock())

    def round_done(self) -> None:
        """Every rank has reported."""
        with self._lock:
            if self._operation is not None or self._round_at is None:
                self._operation_ended_at = self._clock()
            self._round_at, self._operation = self._clock(), None

    def read(self) -> tuple[float | None, float, tuple[str, float] | None]:
        """Seconds since the last round (None before the first), since the last operation ended, and the running one with its seconds."""
        with self._lock:
            now = self._clock()
            age = None if self._round_at is None else now - self._round_at
            idle = 0.0 if self._operation_ended_at is None else now - self._operation_ended_at
            running = None if self._operation is None else (self._operation[0], now - self._operation[1])
            return age, idle, running


class Health:
    """The health of one server, whose loop reports to `pulse`."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        attempt: str,
        num_ranks: int,
        *,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.pulse = Pulse(clock)
        self._identity = {"service": name, "incarnation": incarnation, "attempt": attempt, "num_ranks": num_ranks}
        self._config = config
        self.failure: Callable[[], str | None] = lambda: None  # why this server no longer accepts requests; None while it does

    def report(self, waiting: int, oldest_seconds: float) -> dict[str, object]:
        """The JSON document of `/v2/health/ready`; the server is ready if its `reason` is None. `waiting`: open requests."""
        age, idle, running = self.pulse.read()
        since = None if running is None else time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - running[1]))
        return {
            "ready": (reason := self._reason(age, min(idle, oldest_seconds), running)) is None,
            "reason": reason,
            **self._identity,
            "last_round_seconds_ago": None if age is None else round(age, 3),
            "requests_waiting": waiting,
            "operation": None if running is None else {"name": running[0], "since": since, "seconds": round(running[1], 3)},
        }

    def stuck(self, oldest_seconds: float) -> str | None:
        """Why the server must end although none of its processes has died, such as a stopped Triton. `oldest_seconds` as for `report`."""
        _, idle, running = self.pulse.read()
        seconds, limit = min(idle, oldest_seconds), self._config.stuck_limit_seconds
        if running is not None or seconds <= limit:
            return None
        return f"for {seconds:.0f} s no request has reached the ranks, though some wait (server.stuck_limit_seconds={limit:g})"

    def _reason(self, age: float | None, stuck: float, running: tuple[str, float] | None) -> str | None:
        failure = self.failure()
        if failure is not None:
            return failure
        if running is not None:
            name, seconds = running
            limit = self._config.operation_limit_seconds
            return None if seconds <= limit else f"{name} has run for {seconds:.0f} s (server.operation_limit_seconds={limit:g})"
        if age is None:
            return "it is starting"
        limit = self._config.round_limit_seconds
        if age > limit:
            return f"not all ranks have answered for {age:.0f} s (server.round_limit_seconds={limit:g})"
        if stuck > limit:
            return f"for {stuck:.0f} s no request has reached the ranks, though some wait (server.round_limit_seconds={limit:g})"
        return None


CHECK_SECONDS = 0.5


class Supervisor:
    """A thread that runs `checks` twice a second; each returns what is wrong, or None.

    After the first failure the main thread has `grace_seconds` to end in order. If it hangs, in a collective whose peer is gone for
    example, `last_words(message)` is called and the process exits with status 1.
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
        """The main thread has ended by itself: stop watching."""
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
        except Exception as error:  # a check that raises is itself a failure, for example of the store's connection
            return f"supervision failed: {type(error).__name__}: {error}"


class Purpose:
    """Why a server that was started on its own still runs: its run is not done, and an actor works on it."""

    def __init__(self, actor: Path, done: Path, timeout_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`actor`: the registration that the training component touches as long as it lives; `done`: the run's mark of its end."""
        self._actor, self._done = actor, done
        self._timeout = timeout_seconds
        self._clock = clock
        self._began_with = _changed_at(done)
        self._touched = _changed_at(actor)
        self._seen_at = clock()

    def over(self, idle_seconds: float) -> str:
        """Why the server should end after `idle_seconds` without a request; empty while it should not."""
        if (done := _changed_at(self._done)) is not None and done != self._began_with:
            return f"the run is done ({self._done.name})"
        if (touched := _changed_at(self._actor)) is not None and touched != self._touched:
            self._touched, self._seen_at = touched, self._clock()
        if min(idle_seconds, self._clock() - self._seen_at) > self._timeout:
            return f"for {self._timeout:g} s there was no request and no {self._actor.stem} in the run (server.idle_timeout_seconds)"
        return ""


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
