"""Notices when the servers of a run register themselves in `services/`, and when one of them takes too long."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError


class ServiceWatch:
    """Registrations left behind by an earlier run in the same directory are removed at construction: they name dead servers."""

    def __init__(self, run_directory: RunDirectory, names: Sequence[str], expected: Sequence[str], timeout_seconds: float) -> None:
        self._run_directory = run_directory
        self._waiting = list(names)
        self._expected = frozenset(expected)
        self._timeout_seconds = timeout_seconds
        self._started = time.monotonic()
        for name in names:
            run_directory.service(name).unlink(missing_ok=True)

    def poll(self) -> list[str]:
        """A line for each component that has registered since the last call.

        Raises:
            LaunchError: an expected component has not registered within the time allowed.
        """
        elapsed = time.monotonic() - self._started
        ready = [name for name in self._waiting if self._run_directory.service(name).exists()]
        self._waiting = [name for name in self._waiting if name not in ready]
        late = [name for name in self._waiting if name in self._expected]
        if late and elapsed > self._timeout_seconds:
            missing = ", ".join(str(self._run_directory.service(name)) for name in late)
            raise LaunchError(
                f"{' and '.join(late)} not ready: waited {elapsed:.0f} s for {missing} "
                f"(allowed: ready_timeout_seconds={self._timeout_seconds:g}); see its log in {self._run_directory.logs}"
            )
        return [f"{name}: ready after {elapsed:.1f} s{self._address(name)}" for name in ready]

    def _address(self, name: str) -> str:
        try:
            record = json.loads(self._run_directory.service(name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # only shown, never used: the clients read it with their own checks
            return ""
        return f" at {record['url']}" if isinstance(record, dict) and "url" in record else ""
