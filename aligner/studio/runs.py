"""The runs below a folder, read again and again while they are written: only what is new of each file is read."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aligner.cluster.lease import read_lease
from aligner.cluster.slurm.attempt import History
from aligner.errors import AlignerError, DataError
from aligner.files import publish
from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.jsonl import MetricsTail, StepMetrics
from aligner.reporting.progress import step_seconds
from aligner.reporting.run_view import RunView
from aligner.telemetry.run_files import RunFiles

DEPTH = 6  # folders below the studio's in which runs are looked for
SCAN_SECONDS, LOOK_SECONDS = 10.0, 1.0  # between two searches for runs, and two looks at the files of one
JUDGE_SECONDS, MOST_JUDGED = 30.0, 500  # between two diagnoses; steps of a run after which the rules are judged
RECENT = 20  # steps whose mean pace gives the time left
LAUNCH_LOG, SUBMITTED = "logs/launch.log", "Submitted batch job "  # what `aligner launch` said, if the studio started it; of sbatch
ARCHIVE = ".aligner_studio.json"  # in the studio's folder: the runs that are put away
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


@dataclass(frozen=True, slots=True)
class State:
    """`kind` is one of: running, stalled, queued, failed, stopped, done, unknown; `why` one line for a person."""

    kind: str
    why: str = ""


class Run:
    """One run; `name` is its path below the studio's folder."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.name = str(path.relative_to(folder)) if path != folder else "."
        self.view = RunView(path)
        self._tail = MetricsTail(self.files.metrics)
        self._looked = -LOOK_SECONDS
        self._config: tuple[int, dict[str, Any]] = (0, {})
        self._lock, self._judging = threading.Lock(), threading.Lock()
        self._diagnosis: tuple[int, float, Diagnosis | None] = (0, 0.0, None)  # of so many steps, when
        self.problem = ""  # what cannot be read
        self.state = State("unknown")
        self.identity: dict[str, Any] = {}

    @property
    def files(self) -> RunFiles:
        return self.view.files

    @property
    def steps(self) -> list[StepMetrics]:
        """What has been read so far, by `look`."""
        return self._tail.records

    def look(self) -> None:
        """Read what is new, at most once in LOOK_SECONDS, whoever asks."""
        with self._lock:
            if time.monotonic() - self._looked < LOOK_SECONDS:
                return
            self.problem = ""
            try:
                self._tail.follow()
            except (DataError, OSError) as error:
                self.problem = str(error)
            if "recipe" not in self.identity:  # which a run adds after its id
                self.identity = _json(self.files.identity)
            try:
                self.state = state_of(self.files, self.steps)
            except (OSError, ValueError) as error:  # a file that is removed meanwhile, or is not text: other runs are shown all the same
                self.state = State("unknown", str(error))
            self._looked = time.monotonic()

    @property
    def config(self) -> dict[str, Any]:
        """Its settings; empty if there are none, or they cannot be read."""
        try:
            written = self.files.config.stat().st_mtime_ns
            if written != self._config[0]:
                found = yaml.load(self.files.config.read_bytes(), _LOADER)  # noqa: S506  a safe loader
                self._config = written, found if isinstance(found, dict) else {}
        except (OSError, yaml.YAMLError):
            return {}
        return self._config[1]

    @property
    def recipe(self) -> str:
        """As the run's own record names it; for older runs, its training component's name."""
        if named := str(self.identity.get("recipe", "")):
            return named
        names = sorted(path.name.split(".")[0] for path in self.files.health.glob("*.0.json"))
        return next((name for name in names if name not in ("critic", "reward")), "")

    @property
    def last(self) -> StepMetrics | None:
        return self.steps[-1] if self.steps else None

    @property
    def max_steps(self) -> int:
        """0 if the settings give epochs instead, or no number."""
        loop = self.config.get("loop")
        found = loop.get("max_steps") if isinstance(loop, dict) else 0
        return found if isinstance(found, int) else 0

    def diagnosis(self) -> Diagnosis:
        """The rules' findings so far, judged again at most every JUDGE_SECONDS."""
        with self._judging:
            count, judged, found = self._diagnosis
            if found is None or (len(self.steps) > count and time.monotonic() - judged > JUDGE_SECONDS):
                found = diagnose(list(self.steps), RULES, most=MOST_JUDGED)
                self._diagnosis = len(self.steps), time.monotonic(), found
            return found

    def seconds_left(self) -> float | None:
        """By the pace of the newest steps; None if unknown."""
        recent = self.steps[-RECENT:]
        if self.state.kind not in ("running", "stalled") or len(recent) < 2 or not self.max_steps:
            return None
        paces = [b.time - a.time for a, b in zip(recent, recent[1:], strict=False) if b.step > a.step]
        own = step_seconds(recent[-1].values)
        pace = sorted(paces)[len(paces) // 2] if paces else own
        return None if pace is None else max(self.max_steps - recent[-1].step, 0) * pace


def state_of(files: RunFiles, steps: list[StepMetrics]) -> State:
    """What the run's files say of it. Raises OSError or ValueError for one that cannot be read as text."""
    if files.done.is_file():
        step = _json(files.done).get("step", steps[-1].step if steps else 0)
        return State("done", files.learnt_nothing.read_text().strip()) if files.learnt_nothing.is_file() else State("done", f"step {step}")
    try:
        lease = read_lease(files.lease)
    except (AlignerError, OSError) as error:
        return State("unknown", str(error))
    if lease is not None:
        record, seen_ns = lease
        age = time.time() - seen_ns / 1e9
        if age > max(record.valid_seconds, 30.0):
            return State("failed", f"{record.describe()} has shown no sign of life for {age:.0f} s")
        stalls = sorted(files.stacks.glob("*.report.txt"))
        return State("stalled", stalls[0].read_text().partition("\n")[0]) if stalls else State("running", record.describe())
    return _ended(files, steps)


def _ended(files: RunFiles, steps: list[StepMetrics]) -> State:
    """Of a run that nobody holds and that is not done."""
    attempts = [line for line in History(files.attempts, job="").read() if isinstance(line, dict)]
    if attempts:
        newest = attempts[-1]
        if newest.get("event") == "submitted":
            return State("queued", f"Slurm job {newest.get('job', '?')}")
        kind = "stopped" if newest.get("ending") in ("stopped", "terminated") else "failed"
        return State(kind, f"{newest.get('ending', '')} {newest.get('reason', '')}".strip())
    if reason := _last_error(files):
        return State("failed", reason)
    if files.identity.is_file():
        return State("stopped", f"after step {steps[-1].step}" if steps else "before the first step")
    log = files.path / LAUNCH_LOG
    lines = tail(log, 1 << 12) if log.is_file() else []
    job = next((line.removeprefix(SUBMITTED) for line in reversed(lines) if line.startswith(SUBMITTED)), "")
    is_begun = log.is_file() or files.config.is_file()
    return State("queued", f"Slurm job {job}" if job else "has not begun") if is_begun else State("unknown")


def _last_error(files: RunFiles) -> str:
    """The last line that begins with `error: ` in the logs' ends."""
    found = [(log.stat().st_mtime, line) for log in files.logs.glob("*.log") for line in tail(log, 1 << 14) if line.startswith("error: ")]
    return max(found, default=(0.0, ""))[1].removeprefix("error: ")[:400]


def tail(path: Path, num_bytes: int) -> list[str]:
    """The last lines of a log, of at most so many bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - num_bytes, 0))
        return file.read().decode(errors="replace").splitlines()[size > num_bytes :]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Runs:
    folder: Path
    _runs: dict[Path, Run] = field(default_factory=dict)
    _scanned: float = -SCAN_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def warm_up(self) -> None:
        """Read everything in the background, so that the first page need not wait for all of it."""
        threading.Thread(target=lambda: [run.config for run in self.all()], name="warm-up", daemon=True).start()

    def all(self) -> list[Run]:
        """Every run, the newest first, each looked at."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_SECONDS:
                found = list(_run_folders(self.folder, DEPTH))
                self._runs = {path: self._runs.get(path) or Run(self.folder, path) for path in found}
                self._scanned = time.monotonic()
            runs = list(self._runs.values())
        for run in runs:
            run.look()
        return sorted(runs, key=lambda run: run.last.time if run.last else _changed(run.files.path), reverse=True)

    def get(self, name: str) -> Run | None:
        """The run of this name. A name that leads out of the folder, or to no run, is None."""
        path = (self.folder / name.replace("\0", "?")).resolve()  # no path has one
        if not path.is_relative_to(self.folder) or not is_run(path):
            return None
        with self._lock:
            run = self._runs.setdefault(path, Run(self.folder, path))
        run.look()
        return run

    @property
    def archived(self) -> set[str]:
        """Names of the runs that were put away."""
        found = _json(self.folder / ARCHIVE).get("archived")
        return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()

    def archive(self, names: set[str]) -> None:
        """Put exactly these away. Raises OSError."""
        publish(self.folder / ARCHIVE, lambda new: new.write_text(json.dumps({"archived": sorted(names)}) + "\n"))


def is_run(path: Path) -> bool:
    """Whether this is the directory of a run, begun or started."""
    return any((path / name).is_file() for name in ("run.json", "metrics.jsonl", LAUNCH_LOG))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Runs below, without those inside runs; links to folders are not followed."""
    if is_run(folder):
        yield folder
        return
    try:
        children = sorted((entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)), key=lambda entry: entry.name)
    except OSError:  # somebody else's
        return
    for entry in children if depth else ():
        if not entry.name.startswith("."):
            yield from _run_folders(Path(entry.path), depth - 1)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
