"""Whether another step, and the checkpoint after it, still fit into the time that the scheduler gives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

VARIABLE = "ALIGNER_END_TIME"  # Unix time, set by whoever knows it (the conductor of a Slurm job)
_REMEMBERED_STEPS = 8
_SLACK = 1.2  # steps differ: responses get longer


def seconds_left(environ: Mapping[str, str]) -> Callable[[], float] | None:
    """How long this process may still run, as ALIGNER_END_TIME tells; None where nobody ends it."""
    text = environ.get(VARIABLE, "")
    return (lambda: float(text) - time.time()) if text else None


class TimeBudget:
    """Measures steps and saves; one per rank, and the ranks agree on what it says."""

    def __init__(self, left: Callable[[], float] | None = None) -> None:
        self._left = left
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest_save = 0.0

    def needed_seconds(self) -> float:
        """For a step as long as the longest of the last ones, and a save. A save that was never made is taken to be as long as a step."""
        step = max(self._steps, default=0.0)
        return _SLACK * (step + (self._longest_save or step))

    def is_over(self) -> bool:
        """True where the next step would not be saved in time. The first step is always tried: nothing is known of it."""
        return self._left is not None and bool(self._steps) and self._left() < self.needed_seconds()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step with all that belongs to it but its checkpoint."""
        start = time.monotonic()
        yield
        self._steps.append(time.monotonic() - start)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Measure a save."""
        start = time.monotonic()
        yield
        self._longest_save = max(self._longest_save, time.monotonic() - start)
