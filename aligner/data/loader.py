"""Which examples make up a step: a pure function of the step number, so resuming needs no saved state but that number."""

from __future__ import annotations

import numpy as np

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
        self._cached: tuple[int, list[int]] = (-1, [])  # the last epoch's permutation, only to save time

    def indices(self, step: int) -> list[int]:
        """The `batch_size` examples of `step` (from 0)."""
        if step < 0:
            raise ValueError(f"step is {step}, allowed: at least 0")
        start = step * self.batch_size
        return [self._permutation(p // self.size)[p % self.size] for p in range(start, start + self.batch_size)]

    def epoch(self, step: int) -> float:
        """How many epochs are over when `step` begins."""
        return step * self.batch_size / self.size

    def steps_per_epoch(self) -> int:
        """Steps after which every example was seen at least once."""
        return -(-self.size // self.batch_size)

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            epoch = 0
        if self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def _make(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        draws = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.size)
        return np.argsort(draws, kind="stable").tolist()
