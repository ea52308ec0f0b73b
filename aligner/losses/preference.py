"""Losses on pairs of responses, from log-probs of whole responses: the DPO family.

`preference_loss` takes log-ratios from log-probs per token and sums them up; a `DPOVariant` is a function of one pair's log-ratios.

c and r are log pi - log pi_ref of the chosen and of the rejected response (log pi alone if a loss has no reference), summed or averaged
over the response's tokens; D = c - r; g = eta * (reward of the chosen - reward of the rejected response); e = label_smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.losses.aggregation import checked_loss, masked, refuse_result, require
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import LossOutput, PreferenceBatch, TokenOutputs


class DPOVariant(str, Enum):
    """The loss of a pair."""

    sigmoid = "sigmoid"  # -(1-e) log sigma(beta D) - e log sigma(-beta D) (DPO, 2305.18290; cDPO where e > 0)
    robust = "robust"  # (-(1-e) log sigma(beta D) + e log sigma(-beta D)) / (1 - 2e): unbiased under labels flipped at rate e (2403.00409)
    ipo = "ipo"  # (D - 1 / (2 beta))^2, averaged (2310.12036)
    hinge = "hinge"  # max(0, 1 - beta D) (SLiC, 2305.10425)
    exo = "exo"  # KL(sigma(beta D) || 1 - e), e > 0 (EXO, 2402.00856)
    dpop = "dpop"  # -log sigma(beta (D - dpop_coef max(0, -c))) (DPO-Positive, 2402.13228)
    sppo = "sppo"  # (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (SPPO with hard labels, 2405.00675)
    bco = "bco"  # -log sigma(beta c) - log sigma(-beta r) (BCO without its reward shift, 2404.04656)
    nca = "nca"  # -log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2 (NCA, 2402.05369)
    apo_zero = "apo_zero"  # sigma(-beta c) + sigma(beta r): chosen responses better than the model's (2408.06266)
    apo_down = "apo_down"  # sigma(beta c) + sigma(-beta D): chosen responses worse than the model's (2408.06266)
    rpo_bwd_kl = "rpo_bwd_kl"  # KL(sigma(g) || sigma(beta D)) of two Bernoullis (Nemotron-4 340B, 2406.11704)
    rpo_fwd_kl = "rpo_fwd_kl"  # KL(sigma(beta D) || sigma(g))
    rpo_sq = "rpo_sq"  # (beta D - g)^2
    simpo = "simpo"  # -log sigma(beta D - gamma), averaged, no reference (2405.14734)
    cpo = "cpo"  # -log sigma(beta D), no reference, with the supervised term (2401.08417)
    orpo = "orpo"  # -beta log sigma(log odds of c - log odds of r), averaged, no reference, with the supervised term (2403.07691)

    @property
    def needs_reference(self) -> bool:
        """Whether it is of log-ratios to a reference."""
        return self not in (DPOVariant.simpo, DPOVariant.cpo, DPOVariant.orpo)

    @property
    def needs_margins(self) -> bool:
        """Whether it learns how much better a response is, from `PreferenceBatch.margins`."""
        return self in (DPOVariant.rpo_bwd_kl, DPOVariant.rpo_fwd_kl, DPOVariant.rpo_sq)

    @property
    def takes_smoothing(self) -> bool:
        """Whether label_smoothing has a meaning."""
        return self in (DPOVariant.sigmoid, DPOVariant.robust, DPOVariant.exo, DPOVariant.simpo, DPOVariant.cpo)

    @property
    def averages(self) -> bool:
        """Whether its authors take the mean over a response's tokens, and not the sum."""
        return self in (DPOVariant.ipo, DPOVariant.simpo, DPOVariant.orpo)

    @property
    def sft_coef(self) -> float:
        """Its authors' coefficient of the supervised term."""
        return float(self in (DPOVariant.cpo, DPOVariant.orpo))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRatios:
    """Those of P pairs, each [P], and the loss's settings."""

    chosen: Tensor  # c
    rejected: Tensor  # r
    margins: Tensor  # reward of the chosen response - reward of the rejected one
    beta: float
    smoothing: float = 0.0
    gamma: float = 0.0
    eta: float = 1.0
    dpop_coef: float = 0.0

    @property
    def logits(self) -> Tensor:
        """beta D."""
        return self.beta * (self.chosen - self.rejected)

    @property
    def targets(self) -> Tensor:
        """g."""
        return self.eta * self.margins


@dataclass(frozen=True, kw_only=True, slots=True)
class UserPairLoss:
    """A loss of one's own: `function(LogRatios) -> [P]`, of log-ratios to a reference, summed over a response's tokens."""

    value: str  # how it was named
    function: Callable[[LogRatios], Tensor]
    needs_reference: bool = True
    needs_margins: bool = False
    takes_smoothing: bool = True
    averages: bool = False
    sft_coef: float = 0.0


def pair_losses(ratios: LogRatios, variant: DPOVariant | UserPairLoss) -> Tensor:
    """The variant's loss of each pair, [P], without the supervised term. Raises UserCodeError for what a user's must not return."""
    if isinstance(variant, UserPairLoss):
        found = variant.function(ratios)
        if not isinstance(found, Tensor) or found.shape != ratios.chosen.shape:
            refuse_result(variant.function, found, f"{tuple(ratios.chosen.shape)}: one loss per pair")
        return checked_loss(variant.function, found, ratios.chosen - ratios.rejected)
    if variant not in _LOSSES:
        raise ValueError(f"variant is {variant!r}, expected one of {[v.value for v in DPOVariant]}")
    return _LOSSES[variant](ratios)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of log-probs <= 0, finite, with a finite gradient, even if p rounds to 1.

    log(1 - p) is log(-expm1(log p)): exact near p = 1, where it matters, and within rounding of log p elsewhere.
    """
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """-(1-e) log sigma(x) - e log sigma(-x)."""
    loss = -(1 - smoothing) * logsigmoid(logits)
    return loss - smoothing * logsigmoid(-logits) if smoothing else loss


def _bernoulli_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(sigma(x) || sigma(y)) of the Bernoulli distributions with these logits."""
    yes = logsigmoid(first).exp() * (logsigmoid(first) - logsigmoid(second))
    return yes + logsigmoid(-first).exp() * (logsigmoid(-first) - logsigmoid(-second))


def _sigmoid(p: LogRatios) -> Tensor:
    return _smoothed(p.logits, p.smoothing)


def _robust(p: LogRatios) -> Tensor:
    flipped = p.smoothing * logsigmoid(-p.logits)
    return (flipped - (1 - p.smoothing) * logsigmoid(p.logits)) / (1 - 2 * p.smoothing)


def _ipo(p: LogRatios) -> Tensor:
    return (p.chosen - p.rejected - 1 / (2 * p.beta)).square()


def _hinge(p: LogRatios) -> Tensor:
    return (1 - p.logits).relu()


def _exo(p: LogRatios) -> Tensor:
    told = math.log((1 - p.smoothing) / p.smoothing)
    return _bernoulli_kl(p.logits, torch.full_like(p.logits, told))


def _dpop(p: LogRatios) -> Tensor:
    return -logsigmoid(p.logits - p.beta * p.dpop_coef * (-p.chosen).relu())


def _sppo(p: LogRatios) -> Tensor:
    goal = 1 / (2 * p.beta)
    return (p.chosen - goal).square() + (p.rejected + goal).square()


def _bco(p: LogRatios) -> Tensor:
    return -logsigmoid(p.beta * p.chosen) - logsigmoid(-p.beta * p.rejected)


def _nca(p: LogRatios) -> Tensor:
    return -logsigmoid(p.beta * p.chosen) - (logsigmoid(-p.beta * p.chosen) + logsigmoid(-p.beta * p.rejected)) / 2


def _apo_zero(p: LogRatios) -> Tensor:
    return torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected)


def _apo_down(p: LogRatios) -> Tensor:
    return torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.logits)


def _rpo_bwd_kl(p: LogRatios) -> Tensor:
    return _bernoulli_kl(p.targets, p.logits)


def _rpo_fwd_kl(p: LogRatios) -> Tensor:
    return _bernoulli_kl(p.logits, p.targets)


def _rpo_sq(p: LogRatios) -> Tensor:
    return (p.logits - p.targets).square()


def _simpo(p: LogRatios) -> Tensor:
    return _smoothed(p.logits - p.gamma, p.smoothing)


def _orpo(p: LogRatios) -> Tensor:
    return -p.beta * logsigmoid(log_odds(p.chosen) - log_odds(p.rejected))


_LOSSES: dict[DPOVariant, Callable[[LogRatios], Tensor]] = {
    DPOVariant.sigmoid: _sigmoid,
    DPOVariant.robust: _robust,
    DPOVariant.ipo: _ipo,
    DPOVariant.hinge: _hinge,
    DPOVariant.exo: _exo,
    DPOVariant.dpop: _dpop,
    DPOVariant.sppo: _sppo,
    DPOVariant.bco: _bco,
    DPOVariant.nca: _nca,
    DPOVariant.apo_zero: _apo_zero,
    DPOVariant.apo_down: _apo_down,
    DPOVariant.rpo_bwd_kl: _rpo_bwd_kl,
    DPOVariant.rpo_fwd_kl: _rpo_fwd_kl,
    DPOVariant.rpo_sq: _rpo_sq,
    DPOVariant.simpo: _simpo,
    DPOVariant.cpo: _sigmoid,
    DPOVariant.orpo: _orpo,
}


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
