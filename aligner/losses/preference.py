"""Losses of preferences, from log-probs of whole responses: on pairs (the DPO family), and on responses that are each judged good or bad,
without a partner: KTO (2402.01306) and the unpaired APO-zero (2408.06266).

`preference_loss` takes log-ratios from log-probs per token and sums them up; a `DPOVariant` is a function of one pair's log-ratios.

c and r are log pi - log pi_ref of the chosen and of the rejected response (log pi alone if a loss has no reference), summed or averaged
over the response's tokens; D = c - r; g = eta * (reward of the chosen - reward of the rejected response); e = label_smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.losses.aggregation import checked_loss, masked, masked_mean, masked_sums, refuse_result, require
from aligner.telemetry.metrics import Max, Mean, Metric, merge
from aligner.types import LabeledBatch, LossOutput, PreferenceBatch, TokenOutputs


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


_LOSSES: dict[DPOVariant, Callable[[LogRatios], Tensor]] = {
    DPOVariant.sigmoid: lambda p: _smoothed(p.logits, p.smoothing),
    DPOVariant.robust: lambda p: (p.smoothing * logsigmoid(-p.logits) - (1 - p.smoothing) * logsigmoid(p.logits)) / (1 - 2 * p.smoothing),
    DPOVariant.ipo: lambda p: (p.chosen - p.rejected - 1 / (2 * p.beta)).square(),
    DPOVariant.hinge: lambda p: (1 - p.logits).relu(),
    DPOVariant.exo: lambda p: _bernoulli_kl(p.logits, torch.full_like(p.logits, math.log((1 - p.smoothing) / p.smoothing))),
    DPOVariant.dpop: lambda p: -logsigmoid(p.logits - p.beta * p.dpop_coef * (-p.chosen).relu()),
    DPOVariant.sppo: lambda p: (p.chosen - 1 / (2 * p.beta)).square() + (p.rejected + 1 / (2 * p.beta)).square(),
    DPOVariant.bco: lambda p: -logsigmoid(p.beta * p.chosen) - logsigmoid(-p.beta * p.rejected),
    DPOVariant.nca: lambda p: -logsigmoid(p.beta * p.chosen) - (logsigmoid(-p.beta * p.chosen) + logsigmoid(-p.beta * p.rejected)) / 2,
    DPOVariant.apo_zero: lambda p: torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    DPOVariant.apo_down: lambda p: torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.logits),
    DPOVariant.rpo_bwd_kl: lambda p: _bernoulli_kl(p.targets, p.logits),
    DPOVariant.rpo_fwd_kl: lambda p: _bernoulli_kl(p.logits, p.targets),
    DPOVariant.rpo_sq: lambda p: (p.logits - p.targets).square(),
    DPOVariant.simpo: lambda p: _smoothed(p.logits - p.gamma, p.smoothing),
    DPOVariant.cpo: lambda p: _smoothed(p.logits, p.smoothing),
    DPOVariant.orpo: lambda p: -p.beta * logsigmoid(log_odds(p.chosen) - log_odds(p.rejected)),
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
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs", mask.shape), mask)
    # Per token first: two sums over thousands of tokens would each be rounded at their own size.
    per_token = logprobs
    if variant.needs_reference:
        per_token = logprobs - masked(require(batch.ref_logprobs, "PreferenceBatch.ref_logprobs", mask.shape), mask)
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
    return pair_output(per_pair, real, "preference/loss", means, _token_means(logprobs, mask))


def real_pairs(mask: Tensor) -> Tensor:
    """bool [P] from loss_mask bool [2P, S]: False for filler."""
    return mask.any(dim=1).view(-1, 2).any(dim=1)


def by_pair(x: Tensor, mask: Tensor, *, average: bool) -> tuple[Tensor, Tensor]:
    """`masked_sums` of x [2P, S] for chosen and for rejected responses, each [P]."""
    total = masked_sums(x, mask, average=average)
    chosen, rejected = total.view(-1, 2).unbind(dim=1)
    return chosen, rejected


def pair_output(per_pair: Tensor, real: Tensor, loss: str, means: Mapping[str, Tensor], others: Mapping[str, Metric]) -> LossOutput:
    """Sum of `per_pair` [P] over the `real` pairs and their number. Metrics: its mean as `loss`, each of `means` [P], and `others`."""
    total, count = per_pair.masked_fill(~real, 0.0).sum(), real.sum()
    metrics: dict[str, Metric] = {name: masked_mean(x, real) for name, x in means.items()}
    return LossOutput(total=total, count=count, metrics={**metrics, loss: Mean(total=total.detach(), count=count), **others})


def _token_means(logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    totals, counts = logprobs.detach().sum(dim=1).view(-1, 2).sum(dim=0), mask.sum(dim=1).view(-1, 2).sum(dim=0)
    names = ("preference/chosen_logprob", "preference/rejected_logprob")
    return {name: Mean(total=total, count=count) for name, total, count in zip(names, totals, counts, strict=True)}


def _check(beta: float, variant: DPOVariant | UserPairLoss, label_smoothing: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta is {beta}, expected a number > 0")
    if label_smoothing and not variant.takes_smoothing:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 for variant {variant.value}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number from 0 to below 0.5")
    if variant is DPOVariant.exo and not label_smoothing:
        raise ValueError("label_smoothing is 0, expected a number above it for variant exo, such as 0.001")


class UnpairedLoss(str, Enum):
    """The reference point for a response's log-ratio d = log pi - log pi_ref."""

    kto = "kto"  # the policy's KL to the reference, estimated on mismatched prompts and responses
    apo_zero = "apo_zero"  # 0

    @property
    def needs_kl(self) -> bool:
        """Whether a step makes a pass over mismatched rows."""
        return self is UnpairedLoss.kto


def mean_log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, average_logprobs: bool = False) -> Mean:
    """The mean over rows with tokens of log pi - log pi_ref, float [B, S], summed (or averaged) over the mask; no gradient."""
    ratios = masked_sums(masked(logprobs.detach() - ref_logprobs, mask), mask, average=average_logprobs)
    return masked_mean(ratios, mask.any(dim=1))


def kl_baseline(ratios: Sequence[Mean]) -> float:
    """z = max(0, mean log-ratio) of rows that pair prompts with the responses to others; `ratios` are those of all their batches.

    It is of the *global* batch: a z of each micro-batch would make the loss depend on how a batch is cut. Raises ValueError for no row.
    """
    found = merge([{"kl": ratio} for ratio in ratios])["kl"].value()
    if found != found:
        raise ValueError("no row has a response token, expected the mismatched rows of a whole batch")
    return max(0.0, found)


def kto_loss(
    outputs: TokenOutputs,
    batch: LabeledBatch,
    *,
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    sft_coef: float = 0.0,
    average_logprobs: bool = False,
) -> LossOutput:
    """Sum over responses of w_d sigma(-beta (d - z)) if desirable, w_u sigma(-beta (z - d)) if not; count: responses.

    Reads outputs.logprobs and batch.ref_logprobs, float32 [B, S], and batch.labels [B, 1]: 1 desirable, -1 undesirable. `kl` is z of the
    whole batch (`kl_baseline`; 0 makes it the unpaired APO-zero). d sums (or averages) the log-ratio over the response's tokens. sft_coef
    adds the negative log-likelihood per token of desirable responses. A row with an empty loss_mask is filler and counts nothing.
    Raises ValueError for what is missing or of another shape, and beta <= 0.

    Metrics: kto/loss, kto/accuracy (share of responses on the right side of z) over responses; kto/{desirable_reward, undesirable_reward},
    which are beta * d over those of the kind; kto/kl, which is z; kto/sft_loss over desirable responses, if it is used.
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}, expected a number > 0")
    mask, real = batch.loss_mask, batch.loss_mask.any(dim=1)
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs", mask.shape), mask)
    reference = masked(require(batch.ref_logprobs, "LabeledBatch.ref_logprobs", mask.shape), mask)
    labels = require(batch.labels, "LabeledBatch.labels", (len(mask), 1), "1 or -1 for each response")[:, 0]
    good, bad = real & (labels > 0), real & (labels < 0)
    ratios = masked_sums(logprobs - reference, mask, average=average_logprobs)
    sign = torch.where(good, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(good, desirable_weight, undesirable_weight).to(ratios.dtype)
    per_row = weights * torch.sigmoid(-beta * sign * (ratios - kl))
    metrics: dict[str, Metric] = {
        "kto/accuracy": masked_mean(((ratios - kl) * sign > 0).to(ratios.dtype), real),
        "kto/desirable_reward": masked_mean(beta * ratios, good),
        "kto/undesirable_reward": masked_mean(beta * ratios, bad),
        "kto/kl": Max(maximum=kl),  # the same in every micro-batch
    }
    if sft_coef:
        nll = -masked_sums(logprobs, mask, average=True)
        per_row = per_row + sft_coef * masked(nll, good)
        metrics["kto/sft_loss"] = masked_mean(nll, good)
    total, count = masked(per_row, real).sum(), real.sum()
    metrics["kto/loss"] = Mean(total=total.detach(), count=count)
    return LossOutput(total=total, count=count, metrics=metrics)
