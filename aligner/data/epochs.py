"""Which examples make up a step: a pure function of the step number, so resuming needs no saved state but that number."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

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
        return [int(self._permutation(p // self.size)[p % self.size]) for p in range(start, start + self.batch_size)]

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
