"""The watcher of one rank: writes its health to the run directory, and ends the component when it stalls.

    <run>/health/<component>.<rank>.json            what the rank does, every few seconds
    <run>/stacks/<component>.<rank>.<time>.txt      every thread's stack, written at a stall
    <run>/stacks/<component>.report.txt             who held up whom

It also writes the spans of the run's trace that wait (`aligner.telemetry.recording`): a process that hangs or is killed has left most of
them.

The first rank without progress for the configured time asks the others, by a file, to write their stacks too. Then each rank reads all
health files, reports which ranks hold up the component, and exits with status 1. The ranks may be stuck in a collective, so none is used.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which
from typing import Any

from aligner.errors import ConfigError, describe_os_error
from aligner.parallel.progress import AWAITING, IDLE, Progress, from_json, to_json
from aligner.parallel.stall import RankState, Verdict, diagnose
from aligner.telemetry import recording

MIN_ANSWER_SECONDS = 3.0  # how long the others are given to write their stacks, at least
SPY_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which process this is. `incarnation` is the same on all ranks of one start of the component, and new at every start.

    `servers` are the components of the run whose answers this one waits for.
    """

    component: str
    rank: int
    world_size: int
    host: str
    incarnation: str
    attempt: str = ""
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Health:
    """A health file: who wrote it, what it recorded, and when the file system says it was written."""

    place: Place
    pid: int
    record: dict[str, Any]
    dumped: bool
    ended: bool
    written: float

    @property
    def is_busy(self) -> bool:
        return not self.ended and self.record["phase"] != IDLE

    @property
    def is_awaiting(self) -> bool:
        return self.record["phase"] in AWAITING and self.record["inside"] is None


def clear_last_report(stacks: Path, component: str) -> None:
    """Before a start of a component: put the report of an earlier one aside, and remove its request. One process calls it."""
    report = stacks / f"{component}.report.txt"
    if report.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(report.stat().st_mtime))
        report.replace(stacks / f"{component}.report.{stamp}.txt")
    for request in stacks.glob(f".{component}.*.request"):
        request.unlink(missing_ok=True)


class Watch:
    """A thread beside everything else that a rank does. `stall_seconds` 0: it writes the health file and never ends the process."""

    def __init__(
        self,
        progress: Progress,
        place: Place,
        *,
        health: Path,
        stacks: Path,
        stall_seconds: float,
        last_words: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`last_words` is called with the report, before the process is ended."""
        self._progress = progress
        self._place = place
        self._health = health
        self._stacks = stacks
        self._stall_seconds = stall_seconds
        self._last_words = last_words
        # Rare enough for hundreds of ranks on one shared file system, often enough to notice a stall within a fraction of its time.
        self._interval = min(max(stall_seconds / 10, 0.2), 10.0) if stall_seconds else 10.0
        self._stopped = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    @property
    def request(self) -> Path:
        """The file that exists once a rank of this start has requested all stacks."""
        return self._stacks / f".{self._place.component}.{self._place.incarnation}.request"

    @property
    def report(self) -> Path:
        """The report file of a stall of this component."""
        return self._stacks / f"{self._place.component}.report.txt"

    def start(self) -> None:
        """Begin. Raises ConfigError where the run directory cannot be written to."""
        try:
            self._stacks.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._health.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.record()
        except OSError as error:
            raise ConfigError(f"run.directory: rank {self._place.rank}: {describe_os_error(error, self._health)}") from error
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
                is_over = bool(self._stall_seconds) and (self._is_asked() or self.has_stalled())
            except OSError as error:
                self._warn(f"whether the component stands still cannot be told: {describe_os_error(error, self._health)}")
                continue
            if is_over:
                self._end()

    def _arm(self) -> None:
        """Set a timer that ends the process without the interpreter. This thread resets it while it runs.

        The thread cannot run while native code holds the interpreter's lock.
        """
        if self._stall_seconds:
            faulthandler.dump_traceback_later(self._stall_seconds + self._answer_seconds, file=2, exit=True)

    @property
    def _answer_seconds(self) -> float:
        return max(MIN_ANSWER_SECONDS, 3 * self._interval)

    def _is_asked(self) -> bool:
        return self.request.exists()

    def has_stalled(self) -> bool:
        """Whether the component has stalled, as far as this rank can tell, and does not wait for a server."""
        return self._progress.still_seconds > self._stall_seconds and not self._waits_for_a_server()

    def _waits_for_a_server(self) -> bool:
        """Whether a rank of this component waits for a server, or one is busy for it: the client has deadlines (`server_client.*`)."""
        now = self._own_file.stat().st_mtime
        fresh = [health for health in _read_all(self._health, attempt=self._place.attempt) if now - health.written < self._answer_seconds]
        if any(health.is_awaiting and health.place.incarnation == self._place.incarnation for health in fresh):
            return True
        # A server that stalls is given the time to say so itself, before the component that waits for it is taken for the slow one.
        allowed = self._stall_seconds + self._answer_seconds + 2 * self._interval
        busy = [health for health in fresh if health.place.component in self._place.servers and health.is_busy]
        return any(health.record["still_seconds"] < allowed for health in busy)

    def _end(self) -> None:
        """Stacks, report, end of the process."""
        # Should the file system hang as well, this ends the process.
        faulthandler.dump_traceback_later(self._answer_seconds + 3 * SPY_SECONDS, file=2, exit=True)
        print(f"{self._place.component}.{self._place.rank}: no progress: writing stacks to {self._stacks}", file=sys.stderr, flush=True)
        try:
            self._ask()
            self._dump()
            self.record(dumped=True)
            states = self._wait_for_others()
            verdict = diagnose(self._place.component, states, world_size=self._place.world_size, stall_seconds=self._progress.still_seconds)
            self._spy_on_neighbours(states)
            text = self._publish(verdict)
        except Exception as error:  # whatever it was, the process has to end, and the stacks have to be somewhere
            faulthandler.dump_traceback(file=2, all_threads=True)
            text = f"the stall could not be reported: {type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._last_words(text)
        os._exit(1)

    def _ask(self) -> None:
        try:
            with self.request.open("x") as file:
                file.write(f"rank {self._place.rank}\n")
        except FileExistsError:
            pass  # another one was first

    def _dump(self) -> Path:
        """Every thread's stack, after a line that says what the rank was doing."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = self._stacks / f"{self._place.component}.{self._place.rank}.{stamp}.txt"
        with path.open("w") as file:
            file.write(json.dumps(self._content(dumped=True)) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
        return path

    def _wait_for_others(self) -> list[RankState]:
        """Everybody's record, once all have written their stacks or the time for it is over."""
        deadline = time.monotonic() + self._answer_seconds
        while True:
            mine = self._ours()
            answered = [health for health in mine if health.dumped or health.ended]
            if len(answered) == self._place.world_size or time.monotonic() > deadline:
                return [self._state(health) for health in mine]
            time.sleep(min(self._interval, 0.5))

    def _ours(self) -> list[_Health]:
        """The health of every rank of this start of the component."""
        found = _read_all(self._health, attempt=self._place.attempt)
        return [health for health in found if health.place.incarnation == self._place.incarnation]

    def _state(self, health: _Health) -> RankState:
        absence = ""
        if not (health.dumped or health.ended):
            age = self._own_file.stat().st_mtime - health.written
            absence = f"it did not write its stack; its last sign of life came {max(age, 0):.0f} s before"
            if health.place.host == self._place.host:
                absence = f"{_process_state(health.pid)}; {absence}"
        snapshot = from_json(health.record)
        return RankState(rank=health.place.rank, host=health.place.host, snapshot=snapshot, absence=absence, ended=health.ended)

    def _spy_on_neighbours(self, states: list[RankState]) -> None:
        """The stacks of processes on this machine that cannot write their own."""
        absent = {state.rank for state in states if state.absence and state.host == self._place.host}
        for health in self._ours():
            if health.place.rank in absent:
                path = self._stacks / f"{self._place.component}.{health.place.rank}.by-{self._place.rank}.txt"
                _spy(health.pid, path, "--nonblocking")

    def _publish(self, verdict: Verdict) -> str:
        """The first rank's report stands; every rank shows it."""
        own = self.report.with_suffix(f".{self._place.rank}.tmp")
        own.write_text(f"{verdict.text}\nstacks: {self._stacks}\nstart {self._place.incarnation}\n")
        try:
            os.link(own, self.report)
        except FileExistsError:
            pass
        finally:
            own.unlink()
        return self.report.read_text()

    @property
    def _own_file(self) -> Path:
        return self._health / f"{self._place.component}.{self._place.rank}.json"

    def _content(self, *, dumped: bool = False, ended: bool = False) -> dict[str, Any]:
        record = to_json(self._progress.snapshot())
        return {"place": asdict(self._place), "pid": os.getpid(), "dumped": dumped, "ended": ended, "record": record}

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


def _read_all(directory: Path, *, attempt: str) -> list[_Health]:
    """Every health file of this attempt of the run; one that cannot be read (a full disk) counts as none."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            place = content.pop("place")
            place = Place(**{**place, "servers": tuple(place["servers"])})
            health = _Health(place=place, written=path.stat().st_mtime, **content)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if place.attempt == attempt:
            found.append(health)
    return found


def _process_state(pid: int) -> str:
    """The kernel's state of a process on this machine: its letter and name, or that it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return f"process {pid} is gone"
    state = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "unknown")
    return f"process {pid} is in state {state}"


def _spy(pid: int, path: Path, option: str) -> None:
    """Append py-spy's view of a process, native frames included where it may see them, to a file; nothing where it is not installed."""
    program = which("py-spy") or which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return
    with path.open("a") as file:
        file.write(f"\npy-spy dump {option} of process {pid}:\n")
        file.flush()
        try:
            subprocess.run(
                [program, "dump", option, "--pid", str(pid)], stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=SPY_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            file.write(f"it failed: {error}\n")
