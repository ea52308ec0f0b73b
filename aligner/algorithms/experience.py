"""What an online algorithm does between rollouts and updates, whichever estimator it has: shaped rewards, masks, mini-batches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.algorithms.rollouts import ScoredRollouts
from aligner.losses.aggregation import masked
from aligner.losses.shaping import Moments, ShapingConfig, shape
from aligner.models.guard import Guard, GuardConfig, NonFinite
from aligner.rows import num_rows, select_rows, take_rows
from aligner.types import PolicyBatch, RolloutBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Rollouts whose rewards (and baselines) are those that are learnt from."""

    collected: ScoredRollouts
    moments: Moments  # of all scores so far: to be kept once the step is over
    metrics: Mapping[str, float]


def shaped(collected: ScoredRollouts, batch: RolloutBatch, config: ShapingConfig, moments: Moments, *, max_length: int) -> Shaped:
    """The scores of a step's rollouts as rewards (`aligner.losses.shaping`); a response's length is of what the policy wrote."""
    lengths = batch.loss_mask.sum(dim=1)
    rewards, seen, metrics = shape(collected.rewards, lengths, collected.valid, config, moments, max_length=max_length)
    baselines = collected.baselines
    if baselines is not None:  # where there are any, the settings treat every score alike: see `estimators.check_estimator`
        baselines = shape(baselines, torch.zeros_like(lengths), collected.valid, config, Moments(), max_length=max_length)[0]
    return Shaped(collected=replace(collected, rewards=rewards, baselines=baselines), moments=seen, metrics=metrics)


def finite_rows(x: Tensor, guard: GuardConfig, what: str) -> Tensor:
    """Which rows of x [B, S] are finite everywhere, bool [B]. Every rank calls it with the same tensor.

    Where some are not, and the guard does not skip such updates, it raises RunHalted or RollBack as for an update.
    """
    finite = x.isfinite().all(dim=1)
    if not finite.all() and guard.non_finite is not NonFinite.skip:
        Guard(guard).refuse(f"{what} of {int((~finite).sum())} of {len(finite)} rollouts are not finite")
    return finite


def mini_batches(batch: PolicyBatch, size: int, num_epochs: int, *, key: str) -> list[PolicyBatch]:
    """The updates of one step: in each epoch all rows (shuffled by `key` from the second epoch on) cut into equal parts.

    A part without any token to learn from (all of its responses were masked) is left out: it would only move the optimizer's momentum.
    """
    parts: list[PolicyBatch] = []
    for epoch in range(num_epochs):
        order = list(range(num_rows(batch)))
        if epoch:
            random.Random(f"{key}/{epoch}").shuffle(order)
        shuffled = take_rows(batch, torch.tensor(order)) if epoch else batch
        parts += [select_rows(shuffled, start, start + size) for start in range(0, len(order), size)]
    return [part for part in parts if part.loss_mask.any()]


def masked_mean(x: Tensor, mask: Tensor) -> float:
    """Mean of x [B, S] over the mask; 0 where that is empty."""
    return masked(x.double(), mask).sum().item() / max(int(mask.sum()), 1)
