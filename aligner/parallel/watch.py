"""The watcher of one rank: writes its health to the run directory, and ends the component when it stalls.

    <run>/health/<component>.<rank>.json            what the rank does, every few seconds
    <run>/stacks/<component>.<rank>.<time>.txt      every thread's stack, written at a stall
    <run>/stacks/<component>.report.txt             which ranks held up which others

It also writes the pending spans of the run's trace, so that a process that hangs or is killed leaves most of them.

The first rank without progress for the configured time creates a file that asks the others to write their stacks too. Then each rank
reads all health files, reports which ranks hold up the component, and exits with status 1; no collective is used. A rank inside a
collective waits for the members of the group that have not entered it, one in a point-to-point operation for its peers. A rank is slow if
others wait for it and it waits for nobody, or if its process does not run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from shutil import which
from typing import Any

from aligner.errors import ConfigError, describe_os_error
from aligner.parallel.agreement import rank_list
from aligner.parallel.progress import AWAITING, IDLE, Collective, Progress, Snapshot, from_json
from aligner.telemetry import recording

MIN_ANSWER_SECONDS = 3.0  # the least time that the other ranks have to write their stacks
SPY_SECONDS = 20.0
NUM_KINDS = 3  # collectives that the report names beside a slow rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process; `incarnation` is new for each start of the component. `servers`: those whose answers it waits for."""

    component: str
    rank: int
    world_size: int
    host: str
    incarnation: str
    attempt: str = ""
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """A rank's last record. `written` is the time of its health file; `absence` explains why its process does not run, if it does not."""

    place: Place
    snapshot: Snapshot
    pid: int = 0
    dumped: bool = False  # it has written its stacks
    ended: bool = False  # it has left its session; nothing that is in order waits for it
    written: float = 0.0
    absence: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.place.rank} ({self.place.host})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`culprits` are the ranks that hold up the others; empty if no rank can be named. `text` is for people, several lines."""

    culprits: tuple[int, ...]
    text: str


def clear_last_report(stacks: Path, component: str) -> None:
    """Before a start of a component: put the report of an earlier one aside, and remove its request. One process calls it."""
    report = stacks / f"{component}.report.txt"
    if report.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(report.stat().st_mtime))
        report.replace(stacks / f"{component}.report.{stamp}.txt")
    for request in stacks.glob(f".{component}.*.request"):
        request.unlink(missing_ok=True)


@dataclass(eq=False)
class Watch:
    """A thread beside everything else that a rank does."""

    progress: Progress
    place: Place
    _: KW_ONLY
    health: Path
    stacks: Path
    stall_seconds: float  # 0: only write the health file, and never end the process
    last_words: Callable[[str], None] = lambda text: None  # called with the report, before the process is ended

    def __post_init__(self) -> None:
        # Rare enough for hundreds of ranks on one shared file system, often enough to notice a stall within a fraction of its time.
        self._interval = min(max(self.stall_seconds / 10, 0.2), 10.0) if self.stall_seconds else 10.0
        self._answer_seconds = max(MIN_ANSWER_SECONDS, 3 * self._interval)
        self._own_file = self.health / f"{self.place.component}.{self.place.rank}.json"
        # Exists once a rank of this start has requested all stacks.
        self.request = self.stacks / f".{self.place.component}.{self.place.incarnation}.request"
        self.report = self.stacks / f"{self.place.component}.report.txt"  # of a stall of this component
        self._stopped = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Begin. Raises ConfigError where the run directory cannot be written to."""
        try:
            self.stacks.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.health.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.record()
        except OSError as error:
            raise ConfigError(f"run.directory: rank {self.place.rank}: {describe_os_error(error, self.health)}") from error
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """End the watch in order: no rank waits for this record."""
        self._stopped.set()
        self._thread.join(timeout=5.0)
        faulthandler.cancel_dump_traceback_later()
        self._try_to_write(ended=True)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._arm()
            self._try_to_write()
            recording.flush()
            try:
                is_over = bool(self.stall_seconds) and (self.request.exists() or self.has_stalled())
            except OSError as error:
                self._warn(f"cannot tell whether the component has stalled: {describe_os_error(error, self.health)}")
                continue
            if is_over:
                self._end()

    def _arm(self) -> None:
        """Set a timer that ends the process without the interpreter. This thread resets it; it cannot while native code holds the lock."""
        if self.stall_seconds:
            faulthandler.dump_traceback_later(self.stall_seconds + self._answer_seconds, file=2, exit=True)

    def has_stalled(self) -> bool:
        """Whether the component has stalled, as far as this rank can tell, and does not wait for a server."""
        return self.progress.still_seconds > self.stall_seconds and not self._waits_for_a_server()

    def _waits_for_a_server(self) -> bool:
        """Whether a rank of this component waits for a server, or a server is busy for it: the client has deadlines (`server_client.*`)."""
        now = self._own_file.stat().st_mtime
        fresh = [state for state in _read_all(self.health, attempt=self.place.attempt) if now - state.written < self._answer_seconds]
        if any(
            state.snapshot.phase in AWAITING and state.snapshot.inside is None and state.place.incarnation == self.place.incarnation
            for state in fresh
        ):
            return True
        # A server that stalls has time to report that itself before the component that waits for it counts as slow.
        allowed = self.stall_seconds + self._answer_seconds + 2 * self._interval
        busy = [s for s in fresh if s.place.component in self.place.servers and not s.ended and s.snapshot.phase != IDLE]
        return any(state.snapshot.still_seconds < allowed for state in busy)

    def _end(self) -> None:
        """Stacks, report, end of the process."""
        # This ends the process if the file system hangs as well.
        faulthandler.dump_traceback_later(self._answer_seconds + 3 * SPY_SECONDS, file=2, exit=True)
        print(f"{self.place.component}.{self.place.rank}: no progress: writing stacks to {self.stacks}", file=sys.stderr, flush=True)
        try:
            with contextlib.suppress(FileExistsError), self.request.open("x") as file:  # another rank may be first
                file.write(f"rank {self.place.rank}\n")
            self._dump()
            self.record(dumped=True)
            states = self._wait_for_others()
            verdict = diagnose(self.place.component, states, world_size=self.place.world_size, stall_seconds=self.progress.still_seconds)
            self._spy_on_neighbours(states)
            text = self._publish(verdict)
        except Exception as error:  # of any kind: the process must end, and the stacks must be somewhere
            faulthandler.dump_traceback(file=2, all_threads=True)
            text = f"the stall could not be reported: {type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self.last_words(text)
        os._exit(1)

    def _dump(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        with (self.stacks / f"{self.place.component}.{self.place.rank}.{stamp}.txt").open("w") as file:
            file.write(json.dumps(self._content(dumped=True)) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _wait_for_others(self) -> list[RankState]:
        """Everybody's record, once all have written their stacks or the time for it is over."""
        deadline = time.monotonic() + self._answer_seconds
        while True:
            found = _read_all(self.health, attempt=self.place.attempt)
            states = [state for state in found if state.place.incarnation == self.place.incarnation]
            answered = [state for state in states if state.dumped or state.ended]
            if len(answered) == self.place.world_size or time.monotonic() > deadline:
                return [state if state in answered else replace(state, absence=self._absence(state)) for state in states]
            time.sleep(min(self._interval, 0.5))

    def _absence(self, state: RankState) -> str:
        age = self._own_file.stat().st_mtime - state.written
        absence = f"it did not write its stack; its last sign of life came {max(age, 0):.0f} s before"
        return f"{_process_state(state.pid)}; {absence}" if state.place.host == self.place.host else absence

    def _spy_on_neighbours(self, states: list[RankState]) -> None:
        """py-spy's view of processes on this machine that cannot write their own stacks; nothing if it is not installed."""
        program = which("py-spy") or which("py-spy", path=str(Path(sys.executable).parent))
        for state in states if program else ():
            if not state.absence or state.place.host != self.place.host:
                continue
            command = [program, "dump", "--nonblocking", "--pid", str(state.pid)]
            with (self.stacks / f"{self.place.component}.{state.place.rank}.by-{self.place.rank}.txt").open("a") as file:
                file.write(f"\npy-spy dump --nonblocking of process {state.pid}:\n")
                file.flush()
                try:
                    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=SPY_SECONDS)
                except (OSError, subprocess.TimeoutExpired) as error:
                    file.write(f"it failed: {error}\n")

    def _publish(self, verdict: Verdict) -> str:
        """The first rank to write publishes its report; every rank shows that one."""
        own = self.report.with_suffix(f".{self.place.rank}.tmp")
        own.write_text(f"{verdict.text}\nstacks: {self.stacks}\nstart {self.place.incarnation}\n")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, self.report)
        finally:
            own.unlink()
        return self.report.read_text()

    def _content(self, *, dumped: bool = False, ended: bool = False) -> dict[str, Any]:
        record = asdict(self.progress.snapshot())
        return {"place": asdict(self.place), "pid": os.getpid(), "dumped": dumped, "ended": ended, "record": record}

    def record(self, *, dumped: bool = False, ended: bool = False) -> None:
        """Write the health file. Raises OSError."""
        draft = self._own_file.with_suffix(".tmp")
        draft.write_text(json.dumps(self._content(dumped=dumped, ended=ended)) + "\n")
        draft.replace(self._own_file)

    def _try_to_write(self, *, ended: bool = False) -> None:
        """Write the health file if possible. A failure (a full disk) gives one warning and does not end the run."""
        try:
            self.record(ended=ended)
        except OSError as error:
            self._warn(f"no health file: {describe_os_error(error, self._own_file)}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            print(f"warning: {text}", file=sys.stderr, flush=True)
        self._warned = True


def _read_all(directory: Path, *, attempt: str) -> list[RankState]:
    """Every health file of this attempt of the run. A file that cannot be read (a full disk) is passed over."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            place = content.pop("place")
            place = Place(**{**place, "servers": tuple(place["servers"])})
            snapshot = from_json(content.pop("record"))
            state = RankState(place=place, snapshot=snapshot, written=path.stat().st_mtime, **content)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if place.attempt == attempt:
            found.append(state)
    return found


def _process_state(pid: int) -> str:
    """The kernel's state of a process on this machine: its letter and name, or that it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return f"process {pid} is gone"
    state = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "unknown")
    return f"process {pid} is in state {state}"


def diagnose(component: str, states: Sequence[RankState], *, world_size: int, stall_seconds: float) -> Verdict:
    """Name the slow ranks of a component that has made no progress for `stall_seconds`."""
    by_rank = {state.place.rank: state for state in states}
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    waits = {rank: _waits_for(state, by_rank) for rank, state in by_rank.items()}
    culprits = _culprits(by_rank, waits)
    lines = [f"{component}: no progress for {stall_seconds:.0f} s"]
    lines += [_accusation(by_rank[rank], [by_rank[w] for w, awaited in waits.items() if rank in awaited]) for rank in culprits]
    if missing:
        lines.append(f"{rank_list(missing)}: left no record in the health directory")
    if not culprits:
        lines.append("no single rank can be named: none waits for another one in a collective; the stacks show what they are in")
    lines.append("what every rank did:")
    lines += [f"  {text}: {rank_list(ranks)}" for text, ranks in _groups(by_rank, waits).items()]
    return Verdict(culprits=tuple(culprits), text="\n".join(lines))


def _waits_for(state: RankState, by_rank: Mapping[int, RankState]) -> set[int]:
    """The ranks without which this one cannot continue."""
    inside = state.snapshot.inside
    if inside is None or state.absence or state.ended:
        return set()
    others = {rank for rank in inside.peers or inside.group.members if rank in by_rank and rank != state.place.rank}
    if inside.peers:
        return others
    return {other for other in others if by_rank[other].snapshot.counts.get(inside.group.key, 0) < inside.sequence}


def _culprits(by_rank: Mapping[int, RankState], waits: Mapping[int, set[int]]) -> list[int]:
    awaited = set().union(*waits.values()) if waits else set()
    absent = [rank for rank, state in by_rank.items() if state.absence]
    if absent:  # a process that does not run explains everything, whatever it was doing when it stopped
        return sorted(absent)
    if sinks := sorted(rank for rank in awaited if not waits[rank]):
        return sinks
    outside = [rank for rank, state in by_rank.items() if state.snapshot.inside is None and not state.ended]
    if len(outside) < len(by_rank) or len(by_rank) == 1:
        return sorted(outside)
    return _behind(by_rank)


def _behind(by_rank: Mapping[int, RankState]) -> list[int]:
    """The ranks that have entered fewer collectives than another member. NCCL's calls return early, so no rank is seen inside one.

    Counts are compared within a group, since pipeline stages enter different collectives. A rank may be behind only because it waits for
    another one that is behind. Only their lags tell the two apart, so the rank furthest behind is named.
    """
    tops: Counter[str] = Counter()
    for state in by_rank.values():
        tops |= Counter(state.snapshot.counts)
    lag = {
        rank: max((tops[key] - count for key, count in state.snapshot.counts.items()), default=0)
        for rank, state in by_rank.items()
        if not state.ended
    }
    furthest = max(lag.values(), default=0)
    return sorted(rank for rank, behind in lag.items() if behind == furthest) if furthest else []


def _accusation(state: RankState, waiting: Sequence[RankState]) -> str:
    doing = _doing(state.snapshot)
    if state.absence:
        head = f"{state.name} does not run ({state.absence}); it was last seen {doing}"
    else:
        head = f"{state.name} has ended, {doing}" if state.ended else f"{state.name} stalled: {doing}"
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for other in waiting:
        if other.snapshot.inside is not None:
            kinds[_collective_text(other.snapshot.inside)].append(other.place.rank)
    texts = [f"{rank_list(ranks)} in {text}" for text, ranks in kinds.items()]
    more = f", and {len(texts) - NUM_KINDS} other groups" if len(texts) > NUM_KINDS else ""
    return f"{head}; it is waited for by {', '.join(texts[:NUM_KINDS])}{more}" if texts else head


def _groups(by_rank: Mapping[int, RankState], waits: Mapping[int, set[int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, state in sorted(by_rank.items()):
        text = _doing(state.snapshot, with_time=False)
        if state.absence:
            text = f"not running ({state.absence}), last seen {text}"
        elif state.ended:
            text = f"ended, {text}"
        elif waits[rank]:
            text += f", waiting for {rank_list(sorted(waits[rank]))}"
        found.setdefault(text, []).append(rank)
    return found


def _doing(snapshot: Snapshot, *, with_time: bool = True) -> str:
    place = f"in phase {snapshot.phase} of step {snapshot.step}"
    at = f" since {time.strftime('%H:%M:%S', time.localtime(snapshot.last_progress))}" if with_time else ""
    if snapshot.inside is not None:
        return f"{place} in {_collective_text(snapshot.inside)}{at}"
    last = snapshot.last_left
    after = "" if last is None else f" (after {_collective_text(last)})"
    return f"{place} outside any collective{at}{after}"


def _collective_text(collective: Collective) -> str:
    """`all_reduce #48123 (tensor model parallel group of 2)`; the number counts the group's collectives, the same on all its members."""
    if collective.peers:
        return f"{collective.name} with {rank_list(collective.peers)}"
    label = f"{collective.group.label} " if collective.group.label else ""
    return f"{collective.name} #{collective.sequence} ({label}group of {len(collective.group.members)})"
