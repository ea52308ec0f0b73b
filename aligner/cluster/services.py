"""Watches `services/` for registrations of a run's servers, with a time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError


class ServiceWatch:
    """Registrations left behind by an earlier run in the same directory are removed at construction: they name dead servers."""

    def __init__(self, run_directory: RunDirectory, names: Sequence[str], expected: Sequence[str], timeout_seconds: float) -> None:
        self._run_directory = run_directory
        self._waiting = list(names)
        self._expected = frozenset(expected)
        self._timeout_seconds = timeout_seconds
        self._started = dict.fromkeys(names, time.monotonic())
        for name in names:
            self._forget(name)

    def again(self, name: str) -> None:
        """The component restarts: its old registration names a dead server."""
        self._forget(name)
        self._started[name] = time.monotonic()
        self._waiting = [*(other for other in self._waiting if other != name), name]

    def gone(self, name: str, reason: str) -> None:
        """This component will not restart: stop waiting for it."""
        self._gone(name).write_text(f"{reason}\n")

    def all_ended(self) -> None:
        """Every component has ended: a killed one has left a registration that names a dead process."""
        for name in self._started:
            self._run_directory.service(name).unlink(missing_ok=True)

    def _gone(self, name: str) -> Path:
        return self._run_directory.service(name).with_suffix(".gone")

    def _forget(self, name: str) -> None:
        self._run_directory.service(name).unlink(missing_ok=True)
        self._gone(name).unlink(missing_ok=True)

    def poll(self) -> list[str]:
        """A line for each component that has registered since the last call. Raises LaunchError if an expected one is late."""
        now = time.monotonic()
        self._started |= {name: now for name in self._waiting if waits_for_its_turn(self._run_directory, name)}
        ready = [name for name in self._waiting if is_ready(self._run_directory, name)]
        self._waiting = [name for name in self._waiting if name not in ready]
        expected = [name for name in self._waiting if name in self._expected]
        late = [name for name in expected if now - self._started[name] > self._timeout_seconds]
        if late:
            missing = ", ".join(str(self._run_directory.service(name)) for name in late)
            raise LaunchError(
                f"{' and '.join(late)} not ready: waited {now - self._started[late[0]]:.0f} s for {missing} "
                f"(allowed: ready_timeout_seconds={self._timeout_seconds:g}); see its log in {self._run_directory.logs}"
            )
        return [f"{name}: ready after {now - self._started[name]:.1f} s{self._address(name)}" for name in ready]

    def _address(self, name: str) -> str:
        record = _record(self._run_directory, name) or {}
        return f" at {record['url']}" if "url" in record and record["url"] else ""


def is_ready(run_directory: RunDirectory, name: str) -> bool:
    """Whether a component has registered as ready: it registers as `loading` when it starts."""
    record = _record(run_directory, name)
    return record is not None and ("state" not in record or record["state"] not in ("loading", "waiting"))


def waits_for_its_turn(run_directory: RunDirectory, name: str) -> bool:
    """Whether a component waits to load until others leave the shared GPUs: its time begins afterwards."""
    return (_record(run_directory, name) or {}).get("state") == "waiting"


def _record(run_directory: RunDirectory, name: str) -> dict[str, object] | None:
    try:
        record = json.loads(run_directory.service(name).read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:  # only shown, never used: the clients read it with their own checks
        return {}
    return record if isinstance(record, dict) else {}
