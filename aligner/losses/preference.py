"""Losses on pairs of responses, from log-probs of whole responses: the DPO family.

`aligner.losses.pairs` defines each loss of a pair; here log-ratios are computed from log-probs per token, and losses summed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aligner.losses.aggregation import masked, require
from aligner.losses.pairs import DPOVariant, LogRatios, UserPairLoss, pair_losses
from aligner.metrics import Mean, Metric
from aligner.types import LossOutput, PreferenceBatch, TokenOutputs


def dpo_loss(
    outputs: TokenOutputs,
    batch: PreferenceBatch,
    *,
    beta: float,
    variant: DPOVariant | UserPairLoss = DPOVariant.sigmoid,
    label_smoothing: float = 0.0,
    sft_coef: float | None = None,
    average_logprobs: bool | None = None,
    gamma: float = 0.0,
    eta: float = 1.0,
    dpop_coef: float = 0.0,
) -> LossOutput:
    """Sum over pairs of the variant's loss + sft_coef * (mean negative log-likelihood per token of the chosen response); count: pairs.

    Reads outputs.logprobs, batch.ref_logprobs if the variant needs a reference, float32 [2P, S], rows chosen and rejected interleaved,
    and batch.margins if it needs them. log-probs are summed over a response's tokens, or averaged: `average_logprobs`, which
    defaults (None) to the authors' choice, as does `sft_coef`. `gamma`, `eta`, `dpop_coef`: only for simpo, rpo and dpop. A pair whose rows
    both have an empty loss_mask is filler and counts nothing.
    The supervised term is averaged per response and then over pairs (2404.19733), not over all tokens of the batch, so that it has the
    pairs' count. Raises ValueError for log-probs that are missing or have another shape, beta <= 0, or a label_smoothing that the variant
    does not take.

    Metrics over pairs: preference/{loss, accuracy, margin, chosen_reward, rejected_reward}, a reward being beta * the log-ratio (or
    log-prob) that entered the loss, a tie not accurate; preference/sft_loss if it is used. Over tokens: preference/{chosen_logprob,
    rejected_logprob} (both may fall while the margin grows: 2404.19733).
    """
    _check(beta, variant, label_smoothing)
    sft_coef = variant.sft_coef if sft_coef is None else sft_coef
    average = variant.averages if average_logprobs is None else average_logprobs
    mask, real = batch.loss_mask, real_pairs(batch.loss_mask)
    logprobs = masked(_shaped(outputs.logprobs, batch, "TokenOutputs.logprobs"), mask)
    # Per token first: two sums over thousands of tokens would each be rounded at their own size.
    per_token = logprobs - _reference(batch) if variant.needs_reference else logprobs
    chosen, rejected = by_pair(per_token, mask, average=average)
    settings = {"beta": beta, "smoothing": label_smoothing, "gamma": gamma, "eta": eta, "dpop_coef": dpop_coef}
    margins = batch.margins.to(logprobs.dtype).masked_fill(~real, 0.0)
    per_pair = pair_losses(LogRatios(chosen=chosen, rejected=rejected, margins=margins, **settings), variant)
    means: dict[str, Tensor] = {
        "preference/accuracy": (chosen > rejected).to(logprobs.dtype),
        "preference/margin": beta * (chosen - rejected),
        "preference/chosen_reward": beta * chosen,
        "preference/rejected_reward": beta * rejected,
    }
    if sft_coef:
        means["preference/sft_loss"] = -by_pair(logprobs, mask, average=True)[0]
        per_pair = per_pair + sft_coef * means["preference/sft_loss"]
    result = pair_output(per_pair, real, means)
    return LossOutput(total=result.total, count=result.count, metrics={**result.metrics, **_token_means(logprobs, mask)})


def real_pairs(mask: Tensor) -> Tensor:
    """bool [P] from loss_mask bool [2P, S]: False for filler."""
    return mask.any(dim=1).view(-1, 2).any(dim=1)


def by_pair(x: Tensor, mask: Tensor, *, average: bool) -> tuple[Tensor, Tensor]:
    """Sums (or means) over the masked tokens of `x` [2P, S], which is 0 elsewhere, of chosen and of rejected responses, each [P]."""
    total = x.sum(dim=1)
    if average:
        total = total / mask.sum(dim=1).clamp(min=1)
    chosen, rejected = total.view(-1, 2).unbind(dim=1)
    return chosen, rejected


def pair_output(per_pair: Tensor, real: Tensor, means: Mapping[str, Tensor]) -> LossOutput:
    """Sum of `per_pair` [P] over the `real` pairs and their number, with the mean of each of `means` [P] and `preference/loss`."""
    total, count = per_pair.masked_fill(~real, 0.0).sum(), real.sum()
    metrics: dict[str, Metric] = {name: Mean(total=x.detach().masked_fill(~real, 0.0).sum(), count=count) for name, x in means.items()}
    metrics["preference/loss"] = Mean(total=total.detach(), count=count)
    return LossOutput(total=total, count=count, metrics=metrics)


def _reference(batch: PreferenceBatch) -> Tensor:
    return masked(_shaped(batch.ref_logprobs, batch, "PreferenceBatch.ref_logprobs"), batch.loss_mask)


def _token_means(logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Mean log-prob per token of all chosen and of all rejected responses."""
    totals, counts = logprobs.detach().sum(dim=1).view(-1, 2).sum(dim=0), mask.sum(dim=1).view(-1, 2).sum(dim=0)
    names = ("preference/chosen_logprob", "preference/rejected_logprob")
    return {name: Mean(total=total, count=count) for name, total, count in zip(names, totals, counts, strict=True)}


def _shaped(logprobs: Tensor | None, batch: PreferenceBatch, field: str) -> Tensor:
    found = require(logprobs, field)
    if found.shape != batch.tokens.shape:
        raise ValueError(f"{field} is {tuple(found.shape)}, expected {tuple(batch.tokens.shape)}: one number per token")
    return found


def _check(beta: float, variant: DPOVariant | UserPairLoss, label_smoothing: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta is {beta}, expected a number > 0")
    if label_smoothing and not variant.takes_smoothing:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 for variant {variant.value}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number from 0 to below 0.5")
    if variant is DPOVariant.exo and not label_smoothing:
        raise ValueError("label_smoothing is 0, expected a number above it for variant exo, such as 0.001")
