"""How per-token losses become one number: the sum and the integer count that the trainer divides once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor

from aligner.errors import UserCodeError
from aligner.telemetry.metrics import Mean
from aligner.types import PolicyBatch


class Aggregation(str, Enum):
    """What the mean of a policy loss is taken over."""

    token_mean = "token_mean"  # over all tokens of the global batch (DAPO, 2503.14476)
    sequence_mean = "sequence_mean"  # over the tokens of a sequence, then over sequences (GRPO, 2402.03300)
    sequence_sum_constant = "sequence_sum_constant"  # tokens summed and divided by a constant, then over sequences (Dr. GRPO, 2503.20783)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x`, but 0 at positions where `mask` is False: their values, gradients and NaN do not survive. Shapes [B, S]."""
    return torch.where(mask, x, 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """The metric `mean of x over masked positions`, detached. Shapes [B, S]."""
    return Mean(total=masked(x.detach(), mask).sum(), count=mask.sum())


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    constant: float | None = None,
    *,
    of: PolicyBatch | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum and count of `per_token` [B, S] over `mask` bool [B, S]; the loss is the sum over everything / the count over everything.

    The count is the number of masked tokens for `token_mean`, else of sequences with at least one masked token. `constant` is the divisor
    of `sequence_sum_constant` (the longest response allowed, in tokens). Raises ValueError if that is missing or not positive.
    A sequence is a row, or an episode where the batch (`of`) has such of several rows.
    """
    per_token = masked(per_token, mask)
    if aggregation is Aggregation.token_mean:
        return per_token.sum(), mask.sum()
    tokens = mask.sum(dim=1)
    count = (tokens > 0).sum()
    if of is not None and of.episode_tokens is not None and of.leads is not None:
        tokens, count = of.episode_tokens, of.leads.sum()
    if aggregation is Aggregation.sequence_mean:
        return (per_token.sum(dim=1) / tokens.clamp(min=1)).sum(), count
    if constant is None or constant <= 0:
        raise ValueError(f"aggregation_constant is {constant}; {aggregation.value} needs a number > 0 (the longest response, in tokens)")
    return per_token.sum() / constant, count


def refuse_result(function: object, got: object, expected: str) -> NoReturn:
    """Raise UserCodeError, which is a ValueError, for what a user's function returned: its shape if it is a tensor, else its type."""
    what = tuple(got.shape) if isinstance(got, Tensor) else got if isinstance(got, (str, list)) else type(got).__name__
    raise UserCodeError(f"{getattr(function, 'setting', function)} returned {what}, expected {expected}")


def checked_loss(function: object, loss: Tensor, inputs: Tensor) -> Tensor:
    """The loss that a user's function made of log-ratios. Raises UserCodeError if it has no gradient, or alone is not finite."""
    if not loss.isfinite().all() and inputs.isfinite().all():
        refuse_result(function, "a loss that is not finite", "finite numbers")
    if inputs.requires_grad and not loss.requires_grad:
        refuse_result(function, "a loss without a gradient", "one computed from the log-ratios")
    return loss


def require(tensor: Tensor | None, field: str, shape: Sequence[int] | None = None, what: str = "one number per token") -> Tensor:
    """The tensor. Raises ValueError naming the field if it was not given, or has not the `shape`, which stands for `what`."""
    if tensor is None:
        raise ValueError(f"{field} is needed by this loss and was not given")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{field} is {tuple(tensor.shape)}, expected {tuple(shape)}: {what}")
    return tensor


def masked_sums(x: Tensor, mask: Tensor, *, average: bool) -> Tensor:
    """Sums (or means) over the masked tokens of `x` [B, S], which is 0 elsewhere: [B]."""
    total = x.sum(dim=1)
    if average:
        total = total / mask.sum(dim=1).clamp(min=1)
    return total
