"""Which examples make up a step, and from their token sequences to right-padded batches.

The examples are a pure function of the step number, so resuming needs no saved state but that number. `pad_multiple` rounds S up (tensor or
context parallelism may ask for it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.supervised import PreferencePair, SupervisedExample
from aligner.errors import ConfigError
from aligner.types import FinishReason, LabeledBatch, PreferenceBatch, Rollout, RolloutBatch, TokenBatch
from aligner.types.batches import of_kind
from aligner.types.extras import padded


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

    def steps_per_epoch(self) -> int:
        """Steps after which every example was seen at least once."""
        return self.steps_of(1)

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


def token_batch(
    sequences: Sequence[Sequence[int]], pad_id: int, pad_multiple: int = 1, *, extras: Sequence[Mapping[str, Tensor]] = ()
) -> TokenBatch:
    """Tokens and lengths, with the `extras` of each row."""
    width = _width([len(sequence) for sequence in sequences], pad_multiple)
    return TokenBatch(tokens=_pad(sequences, pad_id, width, torch.int64), lengths=_lengths(sequences), extras=padded(extras, width))


def rollout_batch(rollouts: Sequence[Rollout], pad_id: int, pad_multiple: int = 1) -> RolloutBatch:
    """Rollouts as they are, in their order: loss_mask on the policy's own tokens (end token included), sampler's log-probs, 0 elsewhere."""
    for rollout in rollouts:
        if not rollout.prompt.tokens:
            raise ValueError(f"the prompt of {rollout.prompt.source} has no token: position 0 would be a response token")
    sequences = [rollout.tokens for rollout in rollouts]
    width = _width([len(sequence) for sequence in sequences], pad_multiple)
    masks = [[False] * len(r.prompt.tokens) + list(r.written or [True] * len(r.response)) for r in rollouts]
    logprobs = [[0.0] * len(r.prompt.tokens) + list(r.logprobs) for r in rollouts]
    return RolloutBatch(
        tokens=_pad(sequences, pad_id, width, torch.int64),
        lengths=_lengths(sequences),
        loss_mask=_pad(masks, False, width, torch.bool),
        rollout_logprobs=_pad(logprobs, 0.0, width, torch.float32),
        prompt_ids=torch.tensor([r.prompt.id for r in rollouts], dtype=torch.int64),
        truncated=torch.tensor([r.finish_reason is FinishReason.length for r in rollouts], dtype=torch.bool),
        extras=padded([r.all_extras for r in rollouts], width),
    )


def supervised_batch(examples: Sequence[SupervisedExample], pad_id: int, pad_multiple: int = 1) -> LabeledBatch:
    """Supervised rows, padded; no labels. With the reference's log-probs if the rows have them: all, or none."""
    width = _width([len(example.tokens) for example in examples], pad_multiple)
    mask = _pad([example.loss_mask for example in examples], False, width, torch.bool)
    return LabeledBatch(
        tokens=_pad([example.tokens for example in examples], pad_id, width, torch.int64),
        lengths=_lengths([example.tokens for example in examples]),
        loss_mask=mask,
        ref_logprobs=_stored_logprobs(examples, mask),
        extras=padded([example.extras for example in examples], width),
    )


def preference_batch(pairs: Sequence[PreferencePair], pad_id: int, pad_multiple: int = 1) -> PreferenceBatch:
    """P pairs as 2P rows: row 2i is chosen i, row 2i+1 rejected i."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    labeled = supervised_batch(rows, pad_id, pad_multiple)
    return of_kind(PreferenceBatch, labeled, margins=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32))


def _stored_logprobs(examples: Sequence[SupervisedExample], mask: Tensor) -> Tensor | None:
    stored = [example.ref_logprobs for example in examples if example.ref_logprobs is not None]
    if not stored:
        return None
    if len(stored) < len(examples):
        raise ValueError(f"{len(stored)} of {len(examples)} rows have the reference's log-probs, expected all or none")
    return torch.zeros(mask.shape).masked_scatter_(mask, torch.cat(stored))


def _width(lengths: Sequence[int], pad_multiple: int) -> int:
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is {pad_multiple}, allowed: at least 1")
    if not lengths:
        raise ValueError("a batch needs at least one row, got none")
    return -(-max(lengths) // pad_multiple) * pad_multiple


def _lengths(sequences: Sequence[Sequence[object]]) -> Tensor:
    return torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)


def _pad(rows: Sequence[Sequence[float]], fill: float, width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
