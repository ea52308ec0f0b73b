"""Which examples make up a step: a pure function of the step number, so resuming needs no saved state but that number.

Of a mixture every part of the run has the right shares, and each source its own shuffled epochs: the examples of a run are a sequence of
cycles, in which every source has a number of places in proportion to its share, spread out evenly. A source leaves when its `max_epochs`
are over; the others keep their proportions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aligner.data.mixture import Mixture
from aligner.errors import ConfigError


class EpochSampler:
    """An endless sequence of epochs, each a permutation of `range(size)`, cut into batches.

    Batches may straddle epochs, so no example is ever dropped; a straddling batch can hold an example twice. The permutation of an epoch
    depends on (size, seed, epoch) only: it sorts the raw output of a counter-based generator (Philox), which numpy keeps stable.
    """

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        for name, value, minimum in (("size", size, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < minimum:
                raise ConfigError(f"{name}={value}: must be at least {minimum}")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._cached = (-1, np.empty(0, dtype=np.uint32))  # the last epoch's permutation, only to save time

    def indices(self, step: int) -> list[int]:
        """The `batch_size` examples of `step` (from 0)."""
        if step < 0:
            raise ValueError(f"step is {step}, allowed: at least 0")
        start = step * self.batch_size
        return [self._index(position) for position in range(start, start + self.batch_size)]

    def epoch(self, step: int) -> float:
        """How many epochs are over when `step` begins."""
        return step * self.batch_size / self.size

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of `step` (from 1)."""
        return {"data/epoch": self.epoch(step), **self.shares(step)}

    def shares(self, step: int) -> dict[str, float]:
        """Of several sources, each one's share of `step` (from 1), and the epochs that are over of each."""
        return {}

    def check(self, num_steps: int) -> None:
        """Raise ConfigError if there are not examples enough for so many steps; epochs never end."""

    def steps_of(self, epochs: float) -> int:
        """Steps that so many epochs take, at least 1; the last one may reach into the next epoch."""
        return max(1, math.ceil(Fraction(repr(float(epochs))) * self.size / self.batch_size))

    def _index(self, position: int) -> int:
        """The example at a position of the endless sequence."""
        return int(self._permutation(position // self.size)[position % self.size])

    def _permutation(self, epoch: int) -> NDArray[np.uint32]:
        if not self.shuffle:
            epoch = 0
        if self._cached[0] != epoch:
            order = permutation(self.size, self.seed, epoch) if self.shuffle else np.arange(self.size, dtype=np.uint32)
            self._cached = (epoch, order)
        return self._cached[1]


def permutation(size: int, seed: int, epoch: int, stream: int = 0) -> NDArray[np.uint32]:
    """A permutation of `range(size)`, 4 bytes a number; others for other streams of a run."""
    draws = np.random.Philox(key=np.array([seed, epoch + (stream << 48)], dtype=np.uint64)).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.uint32)


MAX_CYCLE = 2**16  # places; finer shares are rounded to parts of this, and none to 0


def order_of(examples: Sequence[Any], batch_size: int, seed: int) -> EpochSampler:
    """The training order of these examples, which may be a mixture."""
    mixture: Mixture | None = getattr(examples, "mixture", None)
    return EpochSampler(len(examples), batch_size, seed) if mixture is None else MixtureSampler(mixture, batch_size, seed)


class MixtureSampler(EpochSampler):
    """The order of the examples of several sources, numbered consecutively from the first source on."""

    def __init__(self, mixture: Mixture, batch_size: int, seed: int) -> None:
        super().__init__(sum(mixture.sizes), batch_size, seed)
        self.mixture = mixture
        self._offsets = np.array([0, *accumulate(mixture.sizes)])
        self._epochs: dict[int, tuple[int, NDArray[np.uint32]]] = {}  # source -> its last epoch and permutation, only to save time
        weights = mixture.weights
        self._phases = None if weights is None else _phases(weights, mixture.limits)

    def shares(self, step: int) -> dict[str, float]:
        counts = np.bincount(self._offsets.searchsorted(self.indices(step - 1), side="right") - 1, minlength=len(self.mixture.sizes))
        found = {}
        for number, source in enumerate(self.mixture.sources):
            found[f"data/share/{source.name}"] = int(counts[number]) / self.batch_size
            found[f"data/epoch/{source.name}"] = self._used(number, step * self.batch_size) / self.mixture.sizes[number]
        return found

    def check(self, num_steps: int) -> None:
        """Raise ConfigError if all sources reach their `max_epochs` earlier."""
        if self._phases and self._phases[-1].cycle is None and num_steps * self.batch_size > self._phases[-1].start:
            self._end(self._phases[-1].start)

    def _index(self, position: int) -> int:
        """As that of `EpochSampler`. Raises ConfigError if the sources have nothing left."""
        if self._phases is None:
            return super()._index(position)
        number, nth = self._phase(position).at(position)
        size = self.mixture.sizes[number]
        epoch, place = divmod(nth, size)
        if self._epochs.get(number, (-1,))[0] != epoch:
            self._epochs[number] = epoch, permutation(size, self.seed, epoch, stream=number)
        return int(self._offsets[number]) + int(self._epochs[number][1][place])

    def _used(self, number: int, position: int) -> float:
        """Examples of a source before the position; if the sources are one data set, on average."""
        if self._phases is None:
            return position * self.mixture.sizes[number] / self.size
        return self._phase(position - 1).used_before(position)[number]

    def _phase(self, position: int) -> _Phase:
        assert self._phases is not None
        phase = self._phases[bisect_right(self._phases, position, key=lambda phase: phase.start) - 1]
        if phase.cycle is None:
            self._end(phase.start)
        return phase

    def _end(self, total: int) -> None:
        raise ConfigError(
            f"data.train: every source reaches its max_epochs after {total} examples, that is {total // self.batch_size} steps of "
            f"{self.batch_size}; allowed: fewer steps (loop.max_steps, loop.epochs), or a larger max_epochs"
        )


class _Cycle:
    """`counts[source]` places for each source, spread evenly: the nth of n is at (n - 1/2) / n of the cycle, the earlier source first."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.size = sum(counts.values())
        of = np.repeat(list(counts), list(counts.values()))
        at = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.values()])
        self.sources = of[np.lexsort((of, at))]
        self.places = {source: np.flatnonzero(self.sources == source) for source in counts}

    def before(self, source: int, distance: int) -> int:
        """Examples of a source among the first `distance` ones of endless cycles."""
        cycles, rest = divmod(distance, self.size)
        return cycles * len(self.places[source]) + int(self.places[source].searchsorted(rest))

    def distance(self, source: int, count: int) -> int:
        """Examples up to and including the source's `count`-th (at least 1)."""
        cycles, nth = divmod(count - 1, len(self.places[source]))
        return cycles * self.size + int(self.places[source][nth]) + 1


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of the run from position `start` on, with the same sources (None: none); `used` examples of each came before."""

    start: int
    cycle: _Cycle | None
    used: Mapping[int, int]

    def at(self, position: int) -> tuple[int, int]:
        """(source, number of its earlier examples) at a position."""
        assert self.cycle is not None
        distance = position - self.start
        source = int(self.cycle.sources[distance % self.cycle.size])
        return source, self.used[source] + self.cycle.before(source, distance)

    def used_before(self, position: int) -> dict[int, int]:
        """Examples of each source before a position of this phase."""
        assert self.cycle is not None
        more = {source: self.cycle.before(source, position - self.start) for source in self.cycle.places}
        return {source: count + more.get(source, 0) for source, count in self.used.items()}


def _phases(weights: Sequence[float], limits: Sequence[int]) -> list[_Phase]:
    phases, left = [_Phase(0, None, dict.fromkeys(range(len(weights)), 0))], list(range(len(weights)))
    while left:
        cycle, last = _Cycle(_counts({source: weights[source] for source in left})), phases.pop()
        phase = _Phase(last.start, cycle, last.used)
        phases.append(phase)
        ends = [cycle.distance(source, limits[source] - phase.used[source]) for source in left if limits[source]]
        if not ends:
            break
        used = phase.used_before(phase.start + min(ends))
        left = [source for source in left if not limits[source] or used[source] < limits[source]]
        phases.append(_Phase(phase.start + min(ends), None, used))
    return phases


def _counts(weights: Mapping[int, float]) -> dict[int, int]:
    """Places of each source in a cycle: exactly in proportion if the cycle is short, else rounded to parts of `MAX_CYCLE`, at least 1."""
    exact = {source: Fraction(repr(float(weight))) for source, weight in weights.items()}
    scale = math.lcm(*(one.denominator for one in exact.values()))
    whole = {source: int(one * scale) for source, one in exact.items()}
    divisor = math.gcd(*whole.values())
    if sum(whole.values()) // divisor <= MAX_CYCLE:
        return {source: one // divisor for source, one in whole.items()}
    total = sum(whole.values())
    parts = {source: max(1, one * MAX_CYCLE // total) for source, one in whole.items()}
    for source in sorted(whole, key=lambda one: parts[one] * total - whole[one] * MAX_CYCLE)[: max(0, MAX_CYCLE - sum(parts.values()))]:
        parts[source] += 1
    return parts
