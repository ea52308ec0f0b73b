"""Select the responses that a step learns from (the best of each prompt, or pairs), and split them into updates.

Rows are in prompt order, `group_size` neighbours per prompt. Everything here is a pure function of its arguments; ties go by position.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from aligner.types import EpisodeRows, PreferenceBatch
from aligner.types.batches import SampledBatch
from aligner.types.rows import num_rows, take_rows

SampledT = TypeVar("SampledT", bound=SampledBatch)


class Pairing(str, Enum):
    """Which of a prompt's responses are compared."""

    best_worst = "best_worst"  # the one of the highest reward with the one of the lowest (2402.04792 with two responses)
    random = "random"  # two of them
    all = "all"  # each with each


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Rows int64 [P] of the better and of the worse response of each pair; `gaps` float32 [P] > 0, the rewards' differences."""

    chosen: Tensor
    rejected: Tensor
    gaps: Tensor
    num_ties: int  # compared, and left out because their rewards do not differ enough

    @property
    def rows(self) -> Tensor:
        """int64 [2P], chosen and rejected interleaved, as in a PreferenceBatch."""
        return torch.stack([self.chosen, self.rejected], dim=1).flatten()


def best_rows(rewards: Tensor, allowed: Tensor, *, group_size: int, keep: int, min_reward: float | None = None) -> Tensor:
    """The rows, int64 and ascending, of the `keep` best allowed responses to each prompt; fewer if fewer are allowed.

    `rewards` float32 [B], finite; `allowed` bool [B]; rows with less than `min_reward` are never among them.
    """
    usable = allowed if min_reward is None else allowed & (rewards >= min_reward)
    order = rewards.masked_fill(~usable, -torch.inf).view(-1, group_size).argsort(dim=1, descending=True, stable=True)
    best = (order + torch.arange(len(order))[:, None] * group_size)[:, :keep].flatten()
    return best[usable[best]].sort().values


def with_spread(rewards: Tensor, valid: Tensor, group_size: int) -> Tensor:
    """bool [B]: whether the valid rewards of the row's prompt differ at all. Rewards that are all equal single out no response."""
    highest = rewards.masked_fill(~valid, -torch.inf).view(-1, group_size).amax(dim=1)
    lowest = rewards.masked_fill(~valid, torch.inf).view(-1, group_size).amin(dim=1)
    return (highest > lowest).repeat_interleave(group_size)


def pairs_of(rewards: Tensor, allowed: Tensor, *, group_size: int, pairing: Pairing, min_gap: float, seed: int) -> Pairs:
    """Pairs of allowed responses to one prompt, the better first; those that differ by no more than `min_gap` are left out and counted.

    `rewards` float32 [B], finite; `allowed` bool [B]. `seed` decides what `random` draws.
    """
    grouped, usable = rewards.view(-1, group_size), allowed.view(-1, group_size)
    one, other = _compared(grouped, usable, pairing, seed)  # positions in the group, [groups, pairs]
    both = usable.gather(1, one) & usable.gather(1, other) & (one != other)
    gaps = grouped.gather(1, one) - grouped.gather(1, other)
    real = both & (gaps.abs() > min_gap)
    first = torch.arange(len(grouped))[:, None] * group_size
    better, worse = torch.where(gaps > 0, one, other) + first, torch.where(gaps > 0, other, one) + first
    return Pairs(chosen=better[real], rejected=worse[real], gaps=gaps.abs()[real], num_ties=int((both & ~real).sum()))


def pairs_by_length(rewards: Tensor, allowed: Tensor, lengths: Tensor, *, group_size: int, slack: float, min_gap: float) -> Pairs:
    """One pair of allowed responses to each prompt, as `pairs_of` counts them: of the best the shortest, of the worst the longest.

    With r from the lowest to the highest reward of a prompt, the best are those within `slack` * (highest - lowest) of the highest, and the
    worst those within as much of the lowest (Wu et al. 2024, 2407.19594). `lengths` int64 [B]; `slack` at least 0 and below 0.5.
    """
    grouped, usable = rewards.view(-1, group_size), allowed.view(-1, group_size)
    highest = grouped.masked_fill(~usable, -torch.inf).amax(dim=1, keepdim=True)
    lowest = grouped.masked_fill(~usable, torch.inf).amin(dim=1, keepdim=True)
    near, sizes = slack * (highest - lowest), lengths.view(-1, group_size).double()
    best, worst = usable & (grouped >= highest - near), usable & (grouped <= lowest + near)
    one = sizes.masked_fill(~best, torch.inf).argmin(dim=1, keepdim=True)
    other = sizes.masked_fill(~worst, -torch.inf).argmax(dim=1, keepdim=True)
    gaps = grouped.gather(1, one) - grouped.gather(1, other)
    both = usable.sum(dim=1, keepdim=True) > 1
    real = both & (gaps > min_gap)
    first = torch.arange(len(grouped))[:, None] * group_size
    return Pairs(chosen=(one + first)[real], rejected=(other + first)[real], gaps=gaps[real], num_ties=int((both & ~real).sum()))


def num_compared(pairing: Pairing, group_size: int) -> int:
    """How many pairs of a prompt's responses are compared at most."""
    return group_size * (group_size - 1) // 2 if pairing is Pairing.all else 1


def updates_of(batch: SampledT, size: int, num_epochs: int, *, key: str, least: int, episodes: EpisodeRows | None = None) -> list[SampledT]:
    """The updates of one step on examples (rows, pairs of rows, or `episodes`) whose number is not known before.

    In each epoch all of them, shuffled by `key` from the second epoch on, are cut into as few parts of at most `size` as they need, none
    more than one example larger than another: a small last part would weigh its examples more than the others. A part of fewer than
    `least` is filled up with rows that have nothing to learn from: every data-parallel replica needs an example. Only the first part keeps
    rollout_logprobs: from the second on the policy is not the one that sampled.
    """
    unit = 2 if isinstance(batch, PreferenceBatch) else 1
    rows = EpisodeRows(torch.arange(num_rows(batch)) // unit) if episodes is None else episodes
    count = len(rows)
    num_parts = -(-count // size)
    parts: list[SampledT] = []
    for epoch in range(num_epochs):
        order = list(range(count))
        if epoch:
            random.Random(f"{key}/{epoch}").shuffle(order)
        bounds = [part * count // num_parts for part in range(num_parts + 1)]
        parts += [_take(batch, rows, order[start:stop], least) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [*parts[:1], *(replace(part, rollout_logprobs=None) for part in parts[1:])]


def _take(batch: SampledT, rows: EpisodeRows, examples: list[int], least: int) -> SampledT:
    own, fill = rows.rows_of(torch.tensor(examples)), examples[:1] * (least - len(examples))
    part = take_rows(batch, torch.cat([own, rows.rows_of(torch.tensor(fill))]) if fill else own)
    learnt = torch.arange(num_rows(part)) < len(own)
    return replace(part, loss_mask=part.loss_mask & learnt[:, None])


def _compared(rewards: Tensor, usable: Tensor, pairing: Pairing, seed: int) -> tuple[Tensor, Tensor]:
    """Positions in the group of the two responses of each candidate pair, each int64 [groups, pairs]. One of a pair may not be usable."""
    if pairing is Pairing.best_worst:
        best = rewards.masked_fill(~usable, -torch.inf).argmax(dim=1, keepdim=True)
        worst = rewards.masked_fill(~usable, torch.inf).argmin(dim=1, keepdim=True)
        return best, torch.where(rewards.gather(1, best) == rewards.gather(1, worst), _another(usable, best), worst)
    if pairing is Pairing.random:
        noise = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~usable, -1.0)
        drawn = noise.argsort(dim=1, descending=True, stable=True)
        return drawn[:, :1], drawn[:, 1:2]
    if pairing is Pairing.all:
        one, other = torch.combinations(torch.arange(rewards.shape[1])).unbind(dim=1)
        return one.expand(len(rewards), -1), other.expand(len(rewards), -1)
    raise ValueError(f"pairing is {pairing!r}, expected one of {[p.value for p in Pairing]}")


def _another(usable: Tensor, position: Tensor) -> Tensor:
    """Of each group a usable position other than `position` [groups, 1], if there is one: equal rewards are a tie of two responses."""
    return usable.scatter(1, position, False).to(torch.int8).argmax(dim=1, keepdim=True)
