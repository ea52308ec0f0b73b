"""Losses on pairs of responses, from log-probs of whole responses: the DPO family.

Every loss here is `f` of a pair's statistics, summed over pairs. A relative without a reference (SimPO, ORPO) or with rewards (RPO) is one
more function beside `dpo_loss` on the same three parts: `real_pairs`, `by_pair`, `pair_output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.losses.aggregation import masked, require
from aligner.metrics import Mean, Metric
from aligner.types import LossOutput, PreferenceBatch, TokenOutputs


class DPOVariant(str, Enum):
    """What is done with a pair's D = (l - ref) of the chosen response minus that of the rejected one."""

    sigmoid = "sigmoid"  # -log sigma(beta D) (2305.18290); with label_smoothing e: -(1-e) log sigma(beta D) - e log sigma(-beta D) (cDPO)
    robust = "robust"  # (-(1-e) log sigma(beta D) + e log sigma(-beta D)) / (1 - 2e): unbiased under labels flipped at rate e (2403.00409)
    ipo = "ipo"  # (D - 1 / (2 beta))^2, log-probs averaged over the response's tokens (2310.12036)
    hinge = "hinge"  # max(0, 1 - beta D) (SLiC, 2305.10425)


SMOOTHED = (DPOVariant.sigmoid, DPOVariant.robust)  # the variants in which label_smoothing has a meaning


def dpo_loss(
    outputs: TokenOutputs,
    batch: PreferenceBatch,
    *,
    beta: float,
    variant: DPOVariant = DPOVariant.sigmoid,
    label_smoothing: float = 0.0,
    sft_coef: float = 0.0,
) -> LossOutput:
    """Sum over pairs of the variant's loss + sft_coef * (mean negative log-likelihood per token of the chosen response); count: pairs.

    Reads outputs.logprobs and batch.ref_logprobs, float32 [2P, S], rows chosen and rejected interleaved. log-probs are summed over a
    response's tokens (averaged for `ipo`, as its authors did). A pair whose rows both have an empty loss_mask is filler and counts nothing.
    The supervised term is averaged per response and then over pairs (2404.19733), not over all tokens of the batch, so that it has the
    pairs' count. Raises ValueError for log-probs that are missing or have another shape, beta <= 0, or a label_smoothing that the variant
    does not take.

    Metrics over pairs: preference/{loss, accuracy, margin, chosen_reward, rejected_reward}, a reward being beta * the log-ratio that
    entered the loss, a tie not accurate; preference/sft_loss where it is used. Over tokens: preference/{chosen_logprob, rejected_logprob}
    (both may fall while the margin grows: 2404.19733).
    """
    _check(beta, variant, label_smoothing)
    mask, real = batch.loss_mask, real_pairs(batch.loss_mask)
    logprobs = masked(_shaped(outputs.logprobs, batch, "TokenOutputs.logprobs"), mask)
    ref_logprobs = masked(_shaped(batch.ref_logprobs, batch, "PreferenceBatch.ref_logprobs"), mask)
    # Per token first: two sums over thousands of tokens would each be rounded at their own size.
    chosen, rejected = by_pair(logprobs - ref_logprobs, mask, average=variant is DPOVariant.ipo)
    per_pair = _variant_loss(chosen - rejected, beta, variant, label_smoothing)
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


def _variant_loss(difference: Tensor, beta: float, variant: DPOVariant, smoothing: float) -> Tensor:
    """Loss per pair [P] from differences of log-ratios."""
    if variant is DPOVariant.sigmoid:
        loss = -(1 - smoothing) * logsigmoid(beta * difference)
        return loss - smoothing * logsigmoid(-beta * difference) if smoothing else loss
    if variant is DPOVariant.robust:
        loss = -(1 - smoothing) * logsigmoid(beta * difference) + smoothing * logsigmoid(-beta * difference)
        return loss / (1 - 2 * smoothing)
    if variant is DPOVariant.ipo:
        return (difference - 1 / (2 * beta)).square()
    if variant is DPOVariant.hinge:
        return (1 - beta * difference).relu()
    raise ValueError(f"variant is {variant!r}, expected one of {[v.value for v in DPOVariant]}")


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


def _check(beta: float, variant: DPOVariant, label_smoothing: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta is {beta}, expected a number > 0")
    if label_smoothing and variant not in SMOOTHED:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 for variant {variant.value}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number from 0 to below 0.5")
