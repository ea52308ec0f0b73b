"""Compute advantages from rewards. Every function takes the *global* rollout batch: statistics of a part would change the algorithm.

`estimate` gives the advantages of every estimator without a critic, `gae` PPO's. Values outside the mask never reach a result.
Discounted sums along a sequence take no step per token: they are triangular products within blocks, then between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from aligner.losses.aggregation import masked, refuse_result, require

BLOCK = 32  # a product costs BLOCK multiplications per token; the blocks of 1,024 tokens are then one block themselves


def discounted_sums(x: Tensor, decay: float) -> Tensor:
    """y[b, t] = sum over s >= t of decay^(s - t) x[b, s], for floats x [B, S] and decay >= 0 (0: x itself); of x's dtype."""
    rows, length = x.shape
    if length <= BLOCK:
        return x @ _powers(length, decay, x)
    blocks = -(-length // BLOCK)
    padded = x if length == blocks * BLOCK else pad(x, (0, blocks * BLOCK - length))
    sums = (padded.reshape(rows * blocks, BLOCK) @ _powers(BLOCK, decay, x)).view(rows, blocks, BLOCK)
    # What a block's first token sees is what all tokens of the block before it see, discounted by their distance from it.
    onwards = discounted_sums(sums[:, :, 0], decay**BLOCK)
    fade = decay ** torch.arange(BLOCK, 0, -1, dtype=torch.float64, device=x.device)
    sums.addcmul_(pad(onwards[:, 1:], (0, 1))[:, :, None], fade.to(x.dtype))
    return sums.view(rows, blocks * BLOCK)[:, :length]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """decay^(s - t) at [s, t] for s >= t, else 0: [size, size], made in float64."""
    at = torch.arange(size, dtype=torch.float64, device=like.device)
    distance = at[:, None] - at[None, :]
    return torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(like.dtype)


class Estimator(str, Enum):
    """The baseline that a response's rewards are compared with. R is their plain sum, G[t] their discounted sum from token t on."""

    grpo = "grpo"  # (R - mean of its group) / std of its group (2402.03300); without the division Dr. GRPO (2503.20783)
    rloo = "rloo"  # R - mean of the other responses of its group (2402.14740)
    remax = "remax"  # G[t] - reward of the greedy response (2310.10505)
    reinforce = "reinforce"  # G[t] (Williams 1992)
    reinforce_pp = "reinforce_pp"  # G[t], whitened over all tokens of the batch (REINFORCE++, 2501.03262)
    reinforce_pp_baseline = "reinforce_pp_baseline"  # G[t] - mean R of its group, whitened likewise (2501.03262)
    per_turn = "per_turn"  # (G of its turn - mean G of its group's turns of this number) / their std; discounted by turns
    gigpo = "gigpo"  # grpo's + step_weight * (G of its turn - mean G of its group's turns in the same state) / their std (2505.10978)


# One of the user's: (token rewards float [B, S], mask bool [B, S], group_ids int64 [B]) -> advantages [B, S]. Rows without a valid reward
# have an empty mask; what it says outside the mask is not looked at.
UserEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]

TURNED = frozenset({Estimator.per_turn, Estimator.gigpo})  # all tokens of a turn have the same advantage
GROUPED = TURNED | {Estimator.grpo, Estimator.rloo, Estimator.reinforce_pp_baseline}  # compare the responses to one prompt
DIVIDES = TURNED | {Estimator.grpo}  # by a standard deviation, by `normalize_std`
PER_RESPONSE = frozenset({Estimator.grpo, Estimator.rloo})  # all tokens of a response have the same advantage: nothing is discounted
STD_EPSILON = 1e-6
WHITENED = frozenset({Estimator.reinforce_pp, Estimator.reinforce_pp_baseline})


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The turns of B episodes, of at most T: `number` int64 [B, S], from 0, of the turn of each masked token; by it `rewards` float32
    [B, T], which are parts of the episodes' scores, and `states` int64 [B, T], equal where turns of a group answer the same."""

    number: Tensor
    rewards: Tensor
    states: Tensor


@torch.no_grad()
def estimate(
    estimator: Estimator | UserEstimator,
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor | None = None,
    *,
    baselines: Tensor | None = None,
    valid: Tensor | None = None,
    gamma: float = 1.0,
    normalize_std: bool = True,
    std_epsilon: float = STD_EPSILON,
    turns: Turns | None = None,
    step_weight: float = 1.0,
) -> Tensor:
    """Advantages [B, S] of the whole rollout batch; 0 outside the mask and in rows that `counted_rows` leaves out.

    token_rewards float [B, S] (`shaped_rewards`: scores on the last tokens, and the KL if it is part of the reward); mask bool [B, S];
    group_ids int64 [B], equal for responses to one prompt, which the GROUPED need; baselines float [B], which remax needs: the reward of
    the greedy response to each row's prompt; valid bool [B], the rows that have a reward (None: all), the others take part in no
    statistic. `normalize_std` and `std_epsilon` are grpo's (`group_advantages`) and the TURNED's, which need `turns`; `gamma` discounts G,
    theirs by whole turns; `step_weight` is gigpo's.

    A baseline is subtracted from the reward of the last token, as in ReMax's code, so it is discounted like the score. A KL that is part of
    the reward is in R (so in the mean of a group, as in verl and TRL's RLOO) and in G. REINFORCE++ has it there (k1). Its -baseline variant
    has the KL in the loss (k2), for which this is OpenRLHF's `reinforce_baseline` and verl's `reinforce_plus_plus_baseline`.

    Raises ValueError for what is missing or would be ignored, and naming counted rows without a token, whose reward would be lost.
    """
    if isinstance(estimator, Estimator):
        _check_inputs(estimator, group_ids, baselines, gamma)
    counted = counted_rows(estimator, group_ids, torch.ones_like(mask[:, 0]) if valid is None else valid)
    _refuse_empty(mask, counted)
    mask = mask & counted[:, None]
    rewards = masked(token_rewards, mask)
    if not isinstance(estimator, Estimator):
        return _own(estimator, rewards, mask, require(group_ids, "group_ids"))
    if estimator in TURNED:
        weight = step_weight if estimator is Estimator.gigpo else None
        deviate = partial(_relative, normalize_std=normalize_std, eps=std_epsilon)
        return _turn_advantages(rewards, mask, require(group_ids, "group_ids"), turns, deviate, gamma=gamma, step_weight=weight)
    if estimator in GROUPED:
        ids, totals = require(group_ids, "group_ids")[counted], rewards.sum(dim=1, dtype=torch.float64)
        if estimator is Estimator.grpo:
            totals[counted] = group_advantages(totals[counted], ids, normalize_std=normalize_std, eps=std_epsilon)
        elif estimator is Estimator.rloo:
            totals[counted] = rloo_advantages(totals[counted], ids)
        else:
            totals[counted] = group_means(totals[counted], ids)
            baselines = totals
        if estimator in PER_RESPONSE:
            return masked(totals.to(rewards.dtype)[:, None], mask)
    if baselines is not None:
        rewards.scatter_add_(1, _last(mask), -baselines.to(rewards.dtype)[:, None])
    returns = masked(_over_masked(rewards, mask, gamma, inclusive=True), mask)
    return whiten(returns, mask) if estimator in WHITENED else returns


def counted_rows(estimator: Estimator | UserEstimator, group_ids: Tensor | None, valid: Tensor) -> Tensor:
    """bool [B]: the rows that `estimate` learns from: the valid ones, without those left alone in their group if groups are compared.

    A policy loss must leave the others out of its mask too, else they count as tokens that taught nothing.
    """
    if estimator not in GROUPED:
        return valid
    groups: Tensor = require(group_ids, "group_ids").unique(return_inverse=True)[1]
    return valid & (groups[valid].bincount(minlength=groups.shape[0])[groups] > 1)


def outcome_rewards(scores: Tensor, mask: Tensor, valid: Tensor | None = None) -> Tensor:
    """Per-token rewards [B, S]: the score of a row on its last masked token, 0 elsewhere. scores [B], mask bool [B, S].

    Raises ValueError naming the rows (of `valid`, bool [B]; None: of all) without a masked token, whose score would otherwise be lost.
    """
    _refuse_empty(mask, torch.ones_like(mask[:, 0]) if valid is None else valid)
    return masked(scores.new_zeros(mask.shape).scatter_(1, _last(mask), scores[:, None]), mask)


def shaped_rewards(scores: Tensor, mask: Tensor, kl: Tensor, kl_coef: float, valid: Tensor | None = None) -> Tensor:
    """Per-token rewards [B, S] with the KL inside: `outcome_rewards` - kl_coef * kl on masked tokens (Ziegler et al. 2019, 1909.08593).

    kl float [B, S]: the estimate per token (`aligner.losses.kl`) of the policy that sampled; no gradient flows through it.
    """
    return outcome_rewards(scores, mask, valid) - kl_coef * masked(kl.detach(), mask)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): advantages and returns, both [B, S] and 0 outside the mask.

    delta[t] = r[t] + gamma * V[t'] - V[t];  A[t] = delta[t] + gamma * lambda * A[t'];  return[t] = A[t] + V[t]

    with t' the next masked token (unmasked tokens, such as a tool's output, are skipped) and V = A = 0 after the last one: the response
    is taken as ended there, whether by a stop token or by the length limit. `values[t]` is the value of the state in which token t was
    chosen; rewards, values float [B, S]; mask bool [B, S].
    """
    # The recursion unrolled, with a = gamma * lambda: return[t] = r[t] + sum over later tokens of a^(k-1) (a r[t+k] + (gamma - a) V[t+k]).
    decay = gamma * gae_lambda
    rewards, values = masked(rewards, mask), masked(values, mask)
    later = _over_masked((decay * rewards).add_(values, alpha=gamma - decay), mask, decay, inclusive=False)
    returns = masked(rewards.add_(later), mask)
    return returns - values, returns


@torch.no_grad()
def gae_over_rows(
    rewards: Tensor, values: Tensor, mask: Tensor, following: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """`gae`, where t' of a row's last masked token may be a token of another row.

    `following` int64 [B] says which: its place among the B * S tokens of all rows, one row behind the other; -1: V = A = 0 after the row's
    last one. No row may follow itself, however indirectly.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    is_done = torch.zeros_like(following, dtype=torch.bool)
    while not is_done.all():
        ready = ~is_done & ((following < 0) | is_done[following // mask.shape[1]])
        if not ready.any():
            raise ValueError(f"following is {following.tolist()}: rows {(~is_done).nonzero().flatten().tolist()} follow each other")
        after = following[ready].clamp(min=0)
        later = gamma * values.flatten()[after] + gamma * gae_lambda * advantages.flatten()[after]
        own = rewards[ready].scatter_add(1, _last(mask[ready]), torch.where(following[ready] < 0, 0.0, later)[:, None])
        advantages[ready], returns[ready] = gae(own, values[ready], mask[ready], gamma, gae_lambda)
        is_done |= ready
    return advantages, returns


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with mean and uncorrected variance over all masked entries; 0 outside the mask. Shapes [B, S].

    Call it once, with the global batch. The critic's returns stay unwhitened.
    """
    count = mask.sum().clamp(min=1)
    mean = masked(x, mask).sum(dtype=torch.float64) / count  # exact for equal values, whose deviations then are 0
    deviation = masked(x - mean, mask)
    variance = torch.linalg.vector_norm(deviation, dim=1).double().square().sum() / count
    return deviation.div_((variance + 1e-8).sqrt())


@torch.no_grad()
def group_advantages(scores: Tensor, group_ids: Tensor, *, normalize_std: bool, eps: float = STD_EPSILON) -> Tensor:
    """GRPO (2402.03300): (R - mean of its group) / (std of its group + eps); without the division Dr. GRPO (2503.20783). [B] -> [B].

    `group_ids` int64 [B], equal for responses to one prompt; rows of a group need not be neighbours. The standard deviation is the
    sample one (divided by n - 1), as in TRL and verl; the paper does not say. Raises ValueError for a group of one.
    """
    _groups(group_ids)
    return _relative(scores.double(), group_ids[:, None], normalize_std=normalize_std, eps=eps).to(scores.dtype)


@torch.no_grad()
def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO (2402.14740): R minus the mean reward of the *other* responses of its group. [B] -> [B]. A group of one: ValueError."""
    groups, sizes = _groups(group_ids)
    scores64 = scores.double()
    others = _group_sum(scores64, groups, sizes)[groups] - scores64
    return (scores64 - others / (sizes[groups] - 1)).to(scores.dtype)


@torch.no_grad()
def group_means(scores: Tensor, group_ids: Tensor) -> Tensor:
    """The mean score of each row's group, its own included. [B] -> [B]. Raises ValueError for a group of one."""
    groups, sizes = _groups(group_ids)
    return (_group_sum(scores.double(), groups, sizes) / sizes)[groups].to(scores.dtype)


def _turn_advantages(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    turns: Turns | None,
    deviate: Callable[[Tensor, Tensor], Tensor],
    *,
    gamma: float,
    step_weight: float | None,
) -> Tensor:
    """Of the TURNED, gigpo's if there is a `step_weight`; rows without masked tokens take part in nothing. Without `turns` each is one."""
    if turns is None:
        none = rewards.new_zeros(len(mask), 1)
        turns = Turns(number=torch.zeros_like(mask, dtype=torch.int64), rewards=none, states=none.long())
    number = torch.where(mask, turns.number, 0)
    here = torch.zeros_like(turns.states).scatter_add_(1, number, mask.long()) > 0
    own = rewards.new_zeros(here.shape, dtype=torch.float64).scatter_add_(1, number, rewards.double())
    given = masked(turns.rewards.double(), here)  # where they were earned, and not on the last token, where the whole score is
    own = (own + given).scatter_add_(1, number.gather(1, _last(mask)), -given.sum(dim=1, keepdim=True))
    row, turn = here.nonzero(as_tuple=True)
    alike = turn if step_weight is None else turns.states[row, turn]
    returns = discounted_sums(own, gamma)[row, turn]
    found = deviate(returns, torch.stack([group_ids[row], alike], dim=1))
    if step_weight is not None:
        rows = here.any(dim=1)
        whole = own.sum(dim=1)
        whole[rows] = deviate(whole[rows], group_ids[rows, None])
        found = whole[row] + step_weight * found
    table = torch.zeros_like(own).index_put_((row, turn), found)
    return masked(table.gather(1, number).to(rewards.dtype), mask)


def _relative(x: Tensor, keys: Tensor, *, normalize_std: bool, eps: float) -> Tensor:
    """`group_advantages` of float64 x [N] among those of equal keys [N, K]; 0 for one that is alone.

    In float64: else the rounding of a group's mean gives equal numbers a small advantage, which eps does not hide.
    """
    _, groups, sizes = keys.unique(dim=0, return_inverse=True, return_counts=True)
    deviation: Tensor = x - (_group_sum(x, groups, sizes) / sizes)[groups]
    if normalize_std:
        std = (_group_sum(deviation.square(), groups, sizes) / (sizes - 1).clamp(min=1)).sqrt()
        deviation = deviation / (std[groups] + eps)
    return deviation


def _own(estimator: UserEstimator, rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """What it says, checked: UserCodeError for another shape, or for numbers that are not finite though the rewards are."""
    found = estimator(rewards, mask, group_ids)
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        refuse_result(estimator, found, f"advantages of shape {tuple(rewards.shape)}: one number per token")
    found = masked(found.to(rewards), mask)
    if not found.isfinite().all() and rewards.isfinite().all():
        refuse_result(estimator, "advantages that are not finite", "finite ones")
    return found


def _over_masked(x: Tensor, mask: Tensor, decay: float, *, inclusive: bool) -> Tensor:
    """Discounted sum of x [B, S], which is 0 outside the mask, over the masked tokens from each masked one on, or from the one after it.

    The distance between two tokens is counted in masked tokens. What it says of tokens outside the mask means nothing.
    """
    slots = None if decay == 1 else _slots(mask)  # without a discount distances mean nothing
    if slots is not None:
        x = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)
    sums = discounted_sums(x, decay)
    if not inclusive:
        sums = pad(sums[:, 1:], (0, 1))
    return sums if slots is None else sums.gather(1, slots)


def _slots(mask: Tensor) -> Tensor | None:
    """Where a token stands among its row's masked tokens, int64 [B, S]; S for the others. None if no row has a gap in its mask."""
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1, dtype=torch.int32) + mask[:, 0]
    if not (starts > 1).any():
        return None
    return torch.where(mask, mask.cumsum(dim=1) - 1, mask.shape[1])


def _last(mask: Tensor) -> Tensor:
    """Where each row's last masked token stands, int64 [B, 1]; 0 for a row without one."""
    return (mask * torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)).amax(dim=1, keepdim=True).long()


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each row's group [B], and the groups' sizes [G]; ValueError for a group of one."""
    ids, groups, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    lonely = ids[sizes == 1].tolist()
    if lonely:
        raise ValueError(f"groups {lonely[:8]} ({len(lonely)} in all) have 1 response; group baselines need group_size >= 2")
    return groups, sizes


def _group_sum(x: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros_like(sizes, dtype=x.dtype).index_add(0, groups, x)


def _refuse_empty(mask: Tensor, rows: Tensor) -> None:
    empty = (rows & (mask.sum(dim=1) == 0)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"loss_mask is False everywhere in rows {empty[:8]} ({len(empty)} in all): no token can carry their score")


def _check_inputs(estimator: Estimator, group_ids: Tensor | None, baselines: Tensor | None, gamma: float) -> None:
    if estimator in GROUPED and group_ids is None:
        raise ValueError(f"group_ids is None: estimator {estimator.value} compares the responses to a prompt")
    if (estimator is Estimator.remax) != (baselines is not None):
        raise ValueError(f"baselines {'are missing' if baselines is None else 'were given'}: estimator {estimator.value}; they are remax's")
    if estimator in PER_RESPONSE and gamma != 1:
        raise ValueError(f"gamma is {gamma}: estimator {estimator.value} has one advantage per response; allowed: 1")
