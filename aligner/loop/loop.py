"""The training loop that every algorithm shares: resume, steps, validation, checkpoints, logging, signals.

An algorithm provides `step`, `validate` and a small state. Data order and seeds are pure functions of the step number, so a resumed
run continues with the next number. SIGTERM, SIGINT and SIGUSR1 end the run after the current step, with a checkpoint. When a server
dies, or another `AlignerError` ends a step early, the last whole step is saved before the error propagates (unless the failed step
has already changed the weights, which then belong to no step). A `RollBack` saves nothing: the run continues from an older checkpoint
and skips the step that raised it.

`TimeBudget` tells whether another step and its checkpoint fit into the scheduler's time limit.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from aligner.cluster.run_directory import POLICY
from aligner.errors import AlignerError, RollBack, RunHalted
from aligner.models.training.trainable import TrainableModel
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects
from aligner.parallel.progress import Progress
from aligner.run.settings import LoopConfig
from aligner.servers.processes import recorded_signals
from aligner.types import SampleRow

VARIABLE = "ALIGNER_END_TIME"  # Unix time, set by whoever knows it (the conductor of a Slurm job)
NEWEST_BY_TIME = 2  # checkpoints saved by time alone stay until there are so many newer ones
BY_TIME = "saved_by_time"  # in the state of a checkpoint that only loop.save_minutes asked for
_REMEMBERED_STEPS = 8
_SLACK = 1.2  # steps differ: responses get longer


def seconds_left(environ: Mapping[str, str]) -> Callable[[], float] | None:
    """Seconds left until ALIGNER_END_TIME; None if it is not set."""
    text = environ.get(VARIABLE, "")
    return (lambda: float(text) - time.time()) if text else None


class TimeBudget:
    """Measures steps and saves; one per rank, and all ranks agree on the result."""

    def __init__(
        self, left: Callable[[], float] | None = None, *, save_minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left = left
        self._save_seconds = 60 * save_minutes
        self._clock = clock
        self._saved = clock()
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest_save = 0.0

    def needed_seconds(self) -> float:
        """Seconds for the longest recent step plus a save. Before the first save, a save is assumed to take as long as a step."""
        step = max(self._steps, default=0.0)
        return _SLACK * (step + (self._longest_save or step))

    def is_over(self) -> bool:
        """True if the next step could not be saved in time. The first step, of unknown length, is always tried."""
        return self._left is not None and bool(self._steps) and self._left() < self.needed_seconds()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step, all but its checkpoint."""
        start = self._clock()
        yield
        self._steps.append(self._clock() - start)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Measure a save."""
        self._saved = self._clock()
        yield
        self._longest_save = max(self._longest_save, self._clock() - self._saved)

    def wants_save(self) -> bool:
        """True if the last save, or the start, is `save_minutes` ago; never with 0."""
        return 0 < self._save_seconds <= self._clock() - self._saved


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The report of one training step: plain numbers (the same on every rank) and some samples."""

    metrics: Mapping[str, float]
    samples: Sequence[SampleRow] = ()


class Algorithm(Protocol):
    """One training algorithm over its models. Methods are collective: every rank calls them in the same order."""

    def step(self, step: int, clock: Clock) -> StepResult:
        """Train on the data of `step` (counted from 1)."""

    def validate(self) -> Mapping[str, float]:
        """Metrics on held-out data; empty without any."""

    def finish(self) -> None:
        """Wait for background work of the last step; raises its error. Called before every checkpoint and at the end."""

    def state(self) -> dict[str, Any]:
        """JSON-able state to resume from, besides models and step number."""

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Averages(Protocol):
    """A model that may keep a moving average of its weights."""

    def averaged(self) -> AbstractContextManager[None]:
        """The average in the weights' place; collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The result of a recipe's `build`: an algorithm and the model that it trains."""

    algorithm: Algorithm
    model: TrainableModel
    critic: Any = None  # behind a server: saves and resumes with it
    resident: Any = None  # a critic in these processes (`aligner.loop.checkpointing.Resident`)
    given_away: Callable[[], AbstractContextManager[None]] = nullcontext  # in the block servers on the same GPUs may compute; collective
    checkpoint: str = POLICY  # folder of its checkpoints


class Checkpointer(Protocol):
    """Saves and restores everything of a run."""

    def load(self) -> tuple[int, dict[str, Any]]:
        """(last finished step, the algorithm's state) of the newest checkpoint, or (0, {})."""

    def save(self, step: int, state: dict[str, Any], validation: Mapping[str, float]) -> None:
        """Save this component and those it trains behind servers as a pair; files may be written in the background.

        `validation`: the metrics of a validation after this step; empty without one.
        """

    def poll(self) -> bool:
        """Publish a pending save if it has been written; False if it has not, on every rank. Never waits; raises its error."""

    def wait(self) -> None:
        """Wait for a pending save and publish it; raises its error."""

    def settle(self) -> int:
        """Publish this component's part of a pending save, whatever the others' state. Returns the last step on disk."""

    def rescue(self, step: int, state: dict[str, Any]) -> None:
        """Save this component alone: a server may have died."""

    def version(self) -> int:
        """Optimizer steps behind the current weights."""


class Reporter(Protocol):
    """Where numbers and samples go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def note(self, text: str) -> None: ...


class SkippedSteps(Protocol):
    """The training steps that this run skips, because their batches gave numbers that are not finite. Kept through restarts."""

    @property
    def steps(self) -> frozenset[int]:
        """The same on every rank."""

    def add(self, step: int, reason: str) -> None:
        """Collective. Raises RunHalted at the limit of skipped steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An alarm's judgement of a step."""

    note: str = ""  # for the person who watches; empty: nothing
    halt: str = ""  # why the run is to end now; empty: it continues


class Alarm(Protocol):
    """Watches the metrics of finished steps; `aligner.loop.learnt.GapAlarm`."""

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Called once for every step, with metrics that are the same on every rank."""


class Clock:
    """Seconds spent in the named phases of one step; also the rank's phases in `progress`."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress or Progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `time/<name>`; blocks of one name add up."""
        start = time.perf_counter()
        with self._progress.phase(name):
            yield
            platform.synchronize()
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - start


def run(
    algorithm: Algorithm,
    config: LoopConfig,
    *,
    checkpointer: Checkpointer,
    open_reporter: Callable[[int], Reporter],
    progress: Progress | None = None,
    skipped_steps: SkippedSteps | None = None,
    budget: TimeBudget | None = None,
    alarms: Sequence[Alarm] = (),
) -> int:
    """Train from the newest checkpoint (or from the start) to `config.max_steps`. Every rank calls it. Returns the last finished step.

    `open_reporter(start_step)` makes the reporter once the start step is known. `progress` records the current phase. Steps in
    `skipped_steps` are counted but not trained on. If another step could not be saved within `budget`, the run stops as after a signal.
    If one of the `alarms` demands it, the run saves the step and raises RunHalted.
    """
    progress, budget = progress or Progress(), budget or TimeBudget(save_minutes=config.save_minutes)
    finished = _resume(algorithm, checkpointer, progress)
    reporter = open_reporter(finished)
    if finished:
        reporter.note(f"resumed after step {finished}")
    saved, version = finished, checkpointer.version()
    with recorded_signals(STOP_SIGNALS) as stop:  # until everything is saved: a second signal must not end the process while it writes
        try:
            if config.validate_first and not finished:
                with progress.phase("validate"):
                    reporter.log(0, _validated(algorithm))
            reason = ""
            while finished < config.max_steps and not (reason := _stop_reason(stop, budget)):
                step = finished + 1
                progress.at_step(step)
                with budget.step():
                    with progress.phase("step") as recorded:
                        result, is_time = _timed_step(algorithm, step, progress, skipped_steps, budget.wants_save)
                        recorded[platform.PEAK_MEMORY] = platform.peak_memory()
                    # Validation belongs to the step: an error in it leaves the step unfinished only in the log, not in the weights.
                    finished, version = step, checkpointer.version()
                    with progress.phase("report"):
                        validation = _report(algorithm, config, reporter, step, result, progress)
                is_free = checkpointer.poll()
                halt = _heed(alarms, reporter, step, result)
                if (asked := halt or _due(step, config.save_every) or step == config.max_steps) or (is_time and is_free):
                    with budget.save():
                        saved = _save(algorithm, checkpointer, step, validation, progress, by_time=not asked)
                _end_where(halt, checkpointer)
            if finished < config.max_steps:
                reporter.note(f"stopped {reason} after step {finished}" + ("; saving" if saved < finished else ""))
            if saved < finished:
                _save(algorithm, checkpointer, finished, {}, progress)
            with progress.phase("save checkpoint"):
                checkpointer.wait()
        except AlignerError as error:
            settled = checkpointer.settle()
            if isinstance(error, RollBack):
                _skip_step(skipped_steps, error.step or finished + 1, error)
            elif settled < finished:
                _rescue(algorithm, checkpointer, reporter, finished, error=error, whole=checkpointer.version() == version)
            raise
    return finished


def _resume(algorithm: Algorithm, checkpointer: Checkpointer, progress: Progress) -> int:
    with progress.phase("load checkpoint"):
        finished, state = checkpointer.load()
        if finished:
            algorithm.load_state({name: value for name, value in state.items() if name != BY_TIME})
    return finished


def _skip_step(skipped_steps: SkippedSteps | None, step: int, error: RollBack) -> None:
    if skipped_steps is None:
        raise AlignerError(f"step {step} is to be skipped ({error}), and this run keeps no list of such steps") from error
    skipped_steps.add(step, str(error))


def _rescue(
    algorithm: Algorithm, checkpointer: Checkpointer, reporter: Reporter, finished: int, *, error: AlignerError, whole: bool
) -> None:
    if not whole:
        reporter.note(f"step {finished + 1} failed after it had changed the weights ({error}); step {finished} can no longer be saved")
        return
    reporter.note(f"the run cannot continue after step {finished} ({error}); saving that step")
    checkpointer.rescue(finished, algorithm.state())


def _timed_step(
    algorithm: Algorithm, step: int, progress: Progress, skipped_steps: SkippedSteps | None, wants_save: Callable[[], bool]
) -> tuple[StepResult, bool]:
    """A step, and whether it is time for a checkpoint: by the clock of rank 0, which every rank hears of with the others' seconds."""
    if skipped_steps is not None and step in skipped_steps.steps:
        return StepResult(metrics={"optim/step_left_out": 1.0}), False
    clock = Clock(progress)
    start = time.perf_counter()
    result = algorithm.step(step, clock)
    seconds = clock.seconds | {"time/step": time.perf_counter() - start}
    slowest: dict[str, float] = {}
    gathered = gather_objects((seconds, wants_save()))
    for rank_seconds, _ in gathered:
        for name, value in rank_seconds.items():
            slowest[name] = max(value, slowest.get(name, 0.0))
    return StepResult(metrics={**result.metrics, **slowest}, samples=result.samples), gathered[0][1]


def _report(
    algorithm: Algorithm, config: LoopConfig, reporter: Reporter, step: int, result: StepResult, progress: Progress
) -> Mapping[str, float]:
    """Log a step. Returns its validation metrics; empty without a validation."""
    validation: Mapping[str, float] = {}
    if _due(step, config.validate_every):
        with progress.phase("validate"):
            validation = _validated(algorithm)
    reporter.log(step, {**result.metrics, **validation})
    if result.samples and (_due(step, config.table_every) or (config.table_every and step in (1, config.max_steps))):
        reporter.table(step, result.samples)
    return validation


def _validated(algorithm: Algorithm) -> Mapping[str, float]:
    """Metrics of a validation; of a recipe on data with the averaged weights, if it keeps such."""
    model = getattr(algorithm, "model", None)
    with model.averaged() if isinstance(model, Averages) else nullcontext():
        return algorithm.validate()


def _heed(alarms: Sequence[Alarm], reporter: Reporter, step: int, result: StepResult) -> str:
    verdicts = [alarm.judge(step, result.metrics) for alarm in alarms]
    for verdict in verdicts:
        if verdict.note:
            reporter.note(verdict.note)
    return "; ".join(verdict.halt for verdict in verdicts if verdict.halt)


def _end_where(halt: str, checkpointer: Checkpointer) -> None:
    if halt:
        checkpointer.wait()
        raise RunHalted(halt)


def _save(
    algorithm: Algorithm, checkpointer: Checkpointer, step: int, validation: Mapping[str, float], progress: Progress, by_time: bool = False
) -> int:
    with progress.phase("save checkpoint"):
        algorithm.finish()
        checkpointer.save(step, algorithm.state() | ({BY_TIME: True} if by_time else {}), validation)
    return step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stop_reason(stop: list[int], budget: TimeBudget) -> str:
    """Why to stop (the same on every rank), once any rank got a stop signal or runs out of time; else empty."""
    own = "by a signal" if stop else "before the end of its time" if budget.is_over() else ""
    return next(filter(None, gather_objects(own)), "")
