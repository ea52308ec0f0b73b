"""Episodes of several token sequences: sub-agents, branches and compacted contexts share one reward and one place in a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.types.rollouts import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """Everything that one start from a prompt led to: its sequences in order, one reward (None: its judge gave none), and the number of
    its group, within which rewards are compared."""

    rollouts: tuple[Rollout, ...]
    reward: float | None
    group: int

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError(f"Episode.rollouts is empty, in group {self.group}; an episode has at least one sequence")


@dataclass(frozen=True, eq=False)
class EpisodeRows:
    """The B rows of E episodes, those of an episode next to each other: `owner` int64 [B] is each row's episode.

    A tensor per row becomes one per episode, whose sequences then follow one another as one long row, and back. Where every episode is
    one row, all of these return their argument.
    """

    owner: Tensor
    groups: Tensor | None = None  # int64 [E]; None: neighbours, of the size that the algorithm samples
    _first: Tensor = field(init=False)  # int64 [E], the first row of each episode
    _place: Tensor = field(init=False)  # int64 [B], of each row in its episode

    def __post_init__(self) -> None:
        steps = self.owner.diff()
        if len(self.owner) and (self.owner[0] != 0 or ((steps != 0) & (steps != 1)).any()):
            raise ValueError(f"EpisodeRows.owner is {self.owner.tolist()}: must begin at 0 and stay or grow by 1")
        first = torch.cat([self.owner.new_zeros(min(1, len(self.owner))), (steps == 1).nonzero().flatten() + 1])
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_place", torch.arange(len(self.owner)) - first[self.owner])

    @classmethod
    def single(cls, count: int) -> EpisodeRows:
        """Episodes of one sequence each."""
        return cls(torch.arange(count))

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeRows:
        """The rows of these, in their order."""
        owner = [number for number, episode in enumerate(episodes) for _ in episode.rollouts]
        return cls(torch.tensor(owner, dtype=torch.int64), torch.tensor([episode.group for episode in episodes]))

    def __len__(self) -> int:
        """E."""
        return len(self._first)

    @property
    def are_single(self) -> bool:
        """Whether every episode is one row."""
        return len(self) == len(self.owner)

    def groups_of(self, size: int) -> Tensor:
        """The group of each episode, int64 [E]; `size` neighbours each unless the groups are given."""
        return torch.arange(len(self)) // size if self.groups is None else self.groups

    def per_episode(self, x: Tensor) -> Tensor:
        """[E, ...] of x [B, ...], which is the same in all rows of an episode."""
        return x if self.are_single else x[self._first]

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] of x [E, ...]."""
        return x if self.are_single else x[self.owner]

    def total(self, x: Tensor) -> Tensor:
        """The sum [E] over the rows of each episode, of x [B]."""
        return x if self.are_single else x.new_zeros(len(self)).index_add_(0, self.owner, x)

    def rows_of(self, episodes: Tensor) -> Tensor:
        """The rows of these episodes, one episode's after the other's, int64."""
        if self.are_single:
            return episodes
        return torch.cat([(self.owner == episode).nonzero().flatten() for episode in episodes])

    def joined(self, x: Tensor) -> Tensor:
        """[E, K * S] of x [B, S], for episodes of at most K sequences: 0 (False) where an episode has fewer."""
        if self.are_single:
            return x
        long = x.new_zeros(len(self), int(self._place.max()) + 1, x.shape[1])
        long[self.owner, self._place] = x
        return long.flatten(1)

    def split(self, x: Tensor) -> Tensor:
        """[B, S] of x [E, K * S]; undoes `joined`."""
        return x if self.are_single else x.unflatten(1, (int(self._place.max()) + 1, -1))[self.owner, self._place]

    def take(self, rows: Tensor) -> EpisodeRows:
        """Those of the rows with these numbers (int64), each episode's next to each other."""
        owner = self.owner[rows]
        own, renumbered = owner.unique_consecutive(return_inverse=True)
        return EpisodeRows(renumbered, None if self.groups is None else self.groups[own])

    def then(self, others: Sequence[EpisodeRows]) -> EpisodeRows:
        """These rows, and those of `others` behind them. Their groups are others even where they have the same numbers."""
        owner, groups = self.owner, self.groups
        for other in others:
            if groups is None or other.groups is None:
                if groups is not other.groups:
                    raise ValueError("some episodes have groups, others have none")
            else:
                groups = torch.cat([groups, other.groups + int(groups.amax()) + 1])
            owner = torch.cat([owner, other.owner + int(owner[-1]) + 1])
        return EpisodeRows(owner, groups)
