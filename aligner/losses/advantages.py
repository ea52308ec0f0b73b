"""From rewards to advantages. Every function sees the *global* rollout batch: statistics of a part of it would be another algorithm."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.losses.aggregation import masked


def outcome_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Per-token rewards [B, S]: the score of a row on its last masked token, 0 elsewhere. scores [B], mask bool [B, S].

    Raises ValueError naming the rows without a masked token, whose score would otherwise be lost.
    """
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"loss_mask is False everywhere in rows {empty[:8]} ({len(empty)} in all): no token can carry their score")
    last = mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(dim=1)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    return rewards.scatter(1, last[:, None], scores[:, None])


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): advantages and returns, both [B, S] and 0 outside the mask.

    delta[t] = r[t] + gamma * V[t'] - V[t];  A[t] = delta[t] + gamma * lambda * A[t'];  return[t] = A[t] + V[t]

    with t' the next masked token (unmasked tokens, such as a tool's output, are skipped) and V = A = 0 after the last one: the response
    is taken as ended there, whether by a stop token or by the length limit. `values[t]` is the value of the state in which token t was
    chosen; rewards, values float [B, S]; mask bool [B, S].
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return masked(advantages, mask), masked(advantages + values, mask)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with mean and uncorrected variance over all masked entries; 0 outside the mask. Shapes [B, S].

    Call it once, with the global batch. The critic's returns stay unwhitened.
    """
    chosen = x[mask]
    if not chosen.numel():
        return torch.zeros_like(x)
    mean = chosen.mean()
    variance = (chosen - mean).square().mean()
    return masked((x - mean) / (variance + 1e-8).sqrt(), mask)


@torch.no_grad()
def group_advantages(scores: Tensor, group_ids: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """GRPO (2402.03300): (R - mean of its group) / (std of its group + eps); without the division Dr. GRPO (2503.20783). [B] -> [B].

    `group_ids` int64 [B], equal for responses to one prompt; rows of a group need not be neighbours. The standard deviation is the
    sample one (divided by n - 1), as in TRL and verl; the paper does not say. Raises ValueError for a group of one.
    """
    groups, sizes = _groups(group_ids)
    scores64 = scores.double()  # else the rounding of a group's mean gives equal rewards a small advantage, which eps does not hide
    deviation = scores64 - (_group_sum(scores64, groups, sizes) / sizes)[groups]
    if normalize_std:
        std = (_group_sum(deviation.square(), groups, sizes) / (sizes - 1)).sqrt()
        deviation = deviation / (std[groups] + eps)
    return deviation.to(scores.dtype)


@torch.no_grad()
def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO (2402.14740): R minus the mean reward of the *other* responses of its group. [B] -> [B].

    `group_ids` int64 [B], equal for responses to one prompt. Raises ValueError for a group of one.
    """
    groups, sizes = _groups(group_ids)
    scores64 = scores.double()
    others = _group_sum(scores64, groups, sizes)[groups] - scores64
    return (scores64 - others / (sizes[groups] - 1)).to(scores.dtype)


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each row's group [B], and the groups' sizes [G]; ValueError for a group of one."""
    ids, groups, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    lonely = ids[sizes == 1].tolist()
    if lonely:
        raise ValueError(f"groups {lonely[:8]} ({len(lonely)} in all) have 1 response; a group baseline wants group_size >= 2")
    return groups, sizes


def _group_sum(x: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """Sum of x [B] per group [G]."""
    return torch.zeros_like(sizes, dtype=x.dtype).index_add(0, groups, x)
