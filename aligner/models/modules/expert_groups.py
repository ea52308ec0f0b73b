"""Experts in groups, as DeepSeek has them: a token's are chosen from its best groups alone (2405.04434, 2.2.2; 2412.19437, 2.1.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.models.config import Architecture


def limited(scores: Tensor, architecture: Architecture) -> Tensor:
    """Scores [N, experts] with -inf for experts of other groups than the token's best; as they are where there are no groups."""
    if not architecture.router_groups:
        return scores
    grouped = scores.unflatten(-1, (architecture.router_groups, -1))
    of_groups = grouped.topk(architecture.router_group_best, dim=-1).values.sum(dim=-1)
    kept = of_groups.topk(architecture.router_groups_per_token, dim=-1).indices
    others = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)


@dataclass(slots=True)
class GroupLimit:
    """What Megatron-Core's router asks for its choice: its own groups are scored by another number of their experts."""

    architecture: Architecture
    layer_number: int = 0  # Megatron-Core 0.19 tells it

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) [N, topk], of the best groups."""
        return choose(limited(scores, self.architecture), topk, num_groups, group_topk)
