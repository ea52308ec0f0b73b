"""How fast a run goes and when it will end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from aligner.reporting import formats

_RECENT_STEPS = 20
_PHASE_PREFIX = "time/"
_WHOLE_STEP = ("step", "total")


def _phase_name(metric: str) -> str:
    return metric.removeprefix(_PHASE_PREFIX).removesuffix("_seconds")


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase: the metrics `time/<phase>` or `time/<phase>_seconds`, without the one of the whole step."""
    times = {_phase_name(name): value for name, value in metrics.items() if name.startswith(_PHASE_PREFIX)}
    return {name: value for name, value in times.items() if name not in _WHOLE_STEP}


def step_seconds(metrics: Mapping[str, float]) -> float | None:
    """What the run itself says a step took (`time/step`), where it does."""
    for name, value in metrics.items():
        if name.startswith(_PHASE_PREFIX) and _phase_name(name) in _WHOLE_STEP:
            return value
    return None


class Pace:
    """Measures the time between the ends of steps, so that validation and checkpoints count."""

    def __init__(self, *, total_steps: int, start_step: int, clock: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self.current_step = start_step
        self._clock = clock
        self._started = clock()
        self._ends: deque[tuple[int, float]] = deque([(start_step, self._started)], maxlen=_RECENT_STEPS + 1)

    def finish(self, step: int) -> None:
        """`step` has ended now. The first one after a start holds one-time costs: it is forgotten as soon as there is a second."""
        if step > self.current_step:
            self.current_step = step
            self._ends.append((step, self._clock()))

    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def remaining_seconds(self) -> float | None:
        """Remaining steps times the mean of the recent ones, less what the current one has taken; None before the first step ended."""
        ends = list(self._ends)
        if len(ends) < 2:
            return None
        recent = ends if len(ends) == 2 or ends[0][1] != self._started else ends[1:]
        mean = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        if self.current_step >= self.total_steps:
            return 0.0
        left = (self.total_steps - self.current_step) * mean - (self._clock() - ends[-1][1])
        return max(left, 0.0)

    def last_seconds(self, metrics: Mapping[str, float]) -> float:
        """How long the last step took: by its own account, else by the clock."""
        own = step_seconds(metrics)
        if own is not None:
            return own
        return self._ends[-1][1] - self._ends[-2][1] if len(self._ends) > 1 else 0.0

    def eta(self) -> str:
        """`ETA 5m12s`, `done`, or nothing while it cannot be known."""
        remaining = self.remaining_seconds()
        if remaining is None:
            return ""
        return "done" if self.current_step >= self.total_steps else f"ETA {formats.seconds(remaining)}"
