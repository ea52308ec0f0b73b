"""Records what one rank is doing: phase, step, its current collective and the last one it left.

The process's one recorder is made by `aligner.run.session` and handed to the loop and the server. `aligner.parallel.collective_marks`
marks the collectives, `aligner.parallel.watch` writes the record to the run directory and notices when it stands still.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aligner.telemetry import recording

IDLE = "idle"  # the phase of a server that waits for a request
WAIT_FOR_SERVERS = "wait for servers"
# Phases in which a rank waits for a server, outside any collective, with the client's own deadline. They do not count as stalls.
AWAITING = frozenset({WAIT_FOR_SERVERS, "critic_wait"})


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group: `key` is its name on every rank, `label` its purpose, `members` are global ranks."""

    key: str
    label: str
    members: tuple[int, ...]


@dataclass(slots=True)  # not frozen: one is made for every collective, and freezing would double the cost
class Collective:
    """One call of `torch.distributed`. `sequence` numbers the group's collectives from 1, the same on all members; 0 for point-to-point.

    `number` counts this rank's calls. `peers` are the global ranks of the other ends, for point-to-point. `since`: seconds since 1970.
    """

    name: str
    number: int
    group: GroupInfo
    sequence: int
    peers: tuple[int, ...]
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A rank's record at one moment; times in seconds since 1970, `still_seconds` without any progress."""

    phase: str
    phase_since: float
    step: int
    last_progress: float
    still_seconds: float
    inside: Collective | None
    last_left: Collective | None
    counts: dict[str, int]  # collectives entered, by group


@dataclass(slots=True)
class _Thread:
    """The collectives of one thread."""

    inside: Collective | None = None
    last_async: Collective | None = None


class Progress:
    """The recorder. Entering or leaving a phase or a collective, and `heartbeat`, are progress. Any thread may call it.

    Two threads may be in collectives at a time, of different groups; a phase is of the whole rank.
    """

    def __init__(self) -> None:
        self._threads: defaultdict[int, _Thread] = defaultdict(_Thread)
        self._phase, self._phase_since, self._step = "start", time.time(), 0
        self._last_left: Collective | None = None
        self._number = 0
        self._counts: dict[str, int] = {}
        self._still_since = time.monotonic()

    @property
    def inside(self) -> Collective | None:
        """The collective that the calling thread is in."""
        return self._own().inside

    def _own(self) -> _Thread:
        return self._threads[threading.get_ident()]

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, object]]:
        """The block is phase `name` and a span of the trace, whose arguments this yields. The phase around it continues afterwards."""
        before, start = self._phase, time.perf_counter()
        arguments: dict[str, object] = {"step": self._step} if self._step else {}
        self.enter_phase(name)
        try:
            yield arguments
        finally:
            if name != IDLE:
                recording.add(name, start, **arguments)
            self.enter_phase(before)

    def enter_phase(self, name: str) -> None:
        """From now on this is phase `name`."""
        self._phase, self._phase_since = name, time.time()
        self.heartbeat()

    def at_step(self, step: int) -> None:
        """Training step `step` (or a server's running number of operations) begins."""
        self._step = step
        self.heartbeat()
        recording.flush()

    @property
    def step(self) -> int:
        """The training step that began last; 0 before the first."""
        return self._step

    def heartbeat(self) -> None:
        """Something has been done."""
        self._still_since = time.monotonic()

    def enter(self, name: str, group: GroupInfo, peers: tuple[int, ...] = ()) -> None:
        """Record the call of a collective, or with `peers` of a point-to-point operation."""
        self._number += 1
        sequence = 0
        if not peers:
            sequence = self._counts[group.key] = self._counts.get(group.key, 0) + 1
        self._own().inside = Collective(name, self._number, group, sequence, peers, time.time())
        self._still_since = time.monotonic()

    def leave(self, *, is_async: bool) -> None:
        """Record its return; after `is_async` a wait may follow."""
        own = self._own()
        self._last_left, own.inside = own.inside, None
        if is_async:
            own.last_async = self._last_left
        self._still_since = time.monotonic()

    def enter_wait(self) -> None:
        """Record a wait for an asynchronous operation: assumed to be this thread's newest, which completes after the others."""
        own = self._own()
        own.inside = own.last_async
        self._still_since = time.monotonic()

    def leave_wait(self) -> None:
        """End the wait."""
        self._own().inside = None
        self._still_since = time.monotonic()

    @property
    def still_seconds(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._still_since

    def snapshot(self) -> Snapshot:
        """The record of this moment. Callable from another thread."""
        still = self.still_seconds
        entered = [thread.inside for thread in list(self._threads.values()) if thread.inside is not None]
        return Snapshot(
            phase=self._phase,
            phase_since=self._phase_since,
            step=self._step,
            last_progress=time.time() - still,
            still_seconds=still,
            inside=min(entered, key=lambda collective: collective.since, default=None),  # of two, the one that lasts longer
            last_left=self._last_left,
            counts=dict(self._counts),
        )


def from_json(record: dict[str, Any]) -> Snapshot:
    """The inverse of `dataclasses.asdict`, from a health file."""

    def collective(record: dict[str, Any] | None) -> Collective | None:
        if record is None:
            return None
        group = GroupInfo(**{**record["group"], "members": tuple(record["group"]["members"])})
        return Collective(**{**record, "group": group, "peers": tuple(record["peers"])})

    return Snapshot(**{**record, "inside": collective(record["inside"]), "last_left": collective(record["last_left"])})
