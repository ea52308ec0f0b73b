"""The lease of a run: a file that the starter of the run's components touches while it lives. Standard library only.

The conductor in a Slurm batch script and the local launcher hold it (`Lease`), one at a time (`claim`). Every rank watches it
(`watch_lease`) and exits when it goes stale, is withdrawn, or belongs to another start: no process of a run outlives its launcher.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from aligner.errors import LaunchError

VARIABLE = "ALIGNER_LEASE"
ATTEMPT_VARIABLE = "ALIGNER_ATTEMPT"
_BEATS_PER_VALIDITY = 10
_POLLS_PER_VALIDITY = 10
_SETTLE_SECONDS = 0.5
_EXIT_CODE = 1


class RunHeld(LaunchError):
    """Another job, or a local launcher, holds the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """Who holds a run. `job` is a Slurm job id, or "local-<pid>"; watchers exit `valid_seconds` after the last sign of life."""

    job: str
    attempt: str
    host: str
    pid: int
    valid_seconds: float

    def describe(self) -> str:
        what = "the local launcher" if self.job.startswith("local-") else f"Slurm job {self.job}"
        return f"{what} (pid {self.pid} on {self.host}, attempt {self.attempt})"


def read_lease(path: Path) -> tuple[LeaseRecord, int] | None:
    """The lease and its last sign of life (mtime, ns); None without one. Raises LaunchError for a file of another kind. Opens the file
    although `stat` would do: network file systems refresh attributes when a file is opened."""
    try:
        with path.open() as file:
            return LeaseRecord(**json.load(file)), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{path} is not a lease of this version: {error}; if no job of this run lives, remove it") from error


def claim(
    path: Path, record: LeaseRecord, *, is_over: Callable[[LeaseRecord], bool | None], settle_seconds: float = _SETTLE_SECONDS
) -> Lease:
    """Take the run for `record`. `is_over` returns whether another holder has surely ended (None: unknown; signs of life decide). Raises
    RunHeld if another holder lives, at the latest after its `valid_seconds`. Of two simultaneous claims the later file wins: each checks
    again after `settle_seconds`."""
    found = read_lease(path)
    if found is not None and found[0].job != record.job and _lives(path, *found, is_over):
        raise RunHeld(f"the run in {path.parent} is held by {found[0].describe()}, which still lives: one job at a time")
    _write(path, record)
    time.sleep(settle_seconds)
    now = read_lease(path)
    if now is None or now[0] != record:
        holder = now[0].describe() if now else "a process that has left again"
        raise RunHeld(f"the run in {path.parent} was taken at the same time by {holder}: one job at a time")
    return Lease(path, record)


def _lives(path: Path, other: LeaseRecord, seen_ns: int, is_over: Callable[[LeaseRecord], bool | None]) -> bool:
    """Whether the other holder lives: by its job's state if known, else by touches of its lease within its validity."""
    over = is_over(other)
    if over is not None:
        return not over
    deadline = time.monotonic() + other.valid_seconds
    while time.monotonic() < deadline:
        found = read_lease(path)
        if found is None:
            return False
        if found[0] != other or found[1] != seen_ns:
            return True
        time.sleep(other.valid_seconds / _POLLS_PER_VALIDITY / 2)
    return False


def _write(path: Path, record: LeaseRecord) -> None:
    temporary = path.with_name(f".{path.name}.{record.job}.{record.pid}")
    temporary.write_text(json.dumps(asdict(record)) + "\n")
    os.replace(temporary, path)


class Lease:
    """A held lease, touched by a thread of its own until `release`."""

    def __init__(self, path: Path, record: LeaseRecord) -> None:
        self.record = record
        self._path = path
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.lost = ""  # why this process no longer holds the run; empty while it does
        self._thread = threading.Thread(target=self._heartbeat, name="lease", daemon=True)
        self._thread.start()

    def renew(self, attempt: str) -> None:
        """Hold it for the next start of the components; leftovers of the previous start exit."""
        with self._lock:
            self.record = replace(self.record, attempt=attempt)
            _write(self._path, self.record)

    def release(self) -> None:
        """Withdraw it, unless another holder has taken it. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=self.record.valid_seconds)
        found = read_lease(self._path)
        if found is not None and found[0].job == self.record.job:
            self._path.unlink(missing_ok=True)

    def _heartbeat(self) -> None:
        failing_since: float | None = None
        while not self._stop.wait(self.record.valid_seconds / _BEATS_PER_VALIDITY):
            try:
                with self._lock:
                    found = read_lease(self._path)
                    if found is None or found[0].job != self.record.job:
                        self.lost = f"the lease {self._path} was {f'taken by {found[0].describe()}' if found else 'removed'}"
                        return
                    os.utime(self._path)
                failing_since = None
            except (OSError, LaunchError) as error:  # a shared file system may fail briefly
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self.record.valid_seconds:
                    self.lost = f"the lease {self._path} cannot be kept: {error}"
                    return


def _problem(path: Path, attempt: str) -> str:
    """Why this process must exit; returns then. This machine's clock measures ages from change to change."""
    valid_seconds, seen_ns, changed_at, missing = 60.0, 0, time.monotonic(), 0
    while True:
        try:
            found, trouble = read_lease(path), ""
        except (OSError, LaunchError) as error:
            found, trouble = None, f"cannot be read ({error})"
        if found is not None:
            record, touched_ns = found
            if attempt and record.attempt != attempt:
                return f"the lease {path} belongs to attempt {record.attempt} now, this is a process of attempt {attempt}"
            valid_seconds, trouble = record.valid_seconds, f"of {record.describe()} was not touched"
            if touched_ns != seen_ns:
                seen_ns, changed_at = touched_ns, time.monotonic()
        silent = time.monotonic() - changed_at
        if trouble and silent > valid_seconds:
            return f"the lease {path} {trouble} for {silent:.0f} s"
        missing = missing if found is None and trouble else 0 if found is not None else missing + 1
        if missing > 2:  # once may be a hiccup of a network file system between two names of one file
            return f"the lease {path} was withdrawn"
        time.sleep(valid_seconds / _POLLS_PER_VALIDITY)


def watch_lease(environ: Mapping[str, str]) -> None:
    """End this process (exit code 1) when the lease named by ALIGNER_LEASE is gone; no-op if unset. Call it once, early. A thread watches,
    so a rank that hangs in a collective exits too."""
    if not environ.get(VARIABLE):
        return

    def look() -> None:
        problem = _problem(Path(environ[VARIABLE]), environ.get(ATTEMPT_VARIABLE, ""))
        print(f"error: {problem}: the starter of this process has ended, so it exits too", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)

    threading.Thread(target=look, name="lease-watch", daemon=True).start()
