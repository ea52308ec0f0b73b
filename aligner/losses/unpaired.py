"""Losses on responses that are each judged good or bad, without a partner: KTO (2402.01306) and the unpaired APO-zero (2408.06266)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from aligner.losses.aggregation import masked, require
from aligner.telemetry.metrics import Max, Mean, Metric, merge
from aligner.types import LabeledBatch, LossOutput, TokenOutputs


class UnpairedLoss(str, Enum):
    """The reference point for a response's log-ratio d = log pi - log pi_ref."""

    kto = "kto"  # the policy's KL to the reference, estimated on mismatched prompts and responses
    apo_zero = "apo_zero"  # 0

    @property
    def needs_kl(self) -> bool:
        """Whether a step makes a pass over mismatched rows."""
        return self is UnpairedLoss.kto


def mean_log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, average_logprobs: bool = False) -> Mean:
    """The mean over rows of log pi - log pi_ref, summed (or averaged) over a row's masked tokens; no gradient.

    float [B, S] twice and bool [B, S]; rows with an empty mask count nothing.
    """
    ratios = _row_sums(masked(logprobs.detach() - ref_logprobs, mask), mask, average=average_logprobs)
    return _mean(ratios, mask.any(dim=1))


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
    logprobs = masked(_shaped(outputs.logprobs, mask, "TokenOutputs.logprobs"), mask)
    reference = masked(_shaped(batch.ref_logprobs, mask, "LabeledBatch.ref_logprobs"), mask)
    good, bad = _kinds(batch, real)
    ratios = _row_sums(logprobs - reference, mask, average=average_logprobs)
    sign = torch.where(good, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(good, desirable_weight, undesirable_weight).to(ratios.dtype)
    per_row = weights * torch.sigmoid(-beta * sign * (ratios - kl))
    metrics: dict[str, Metric] = {
        "kto/accuracy": _mean(((ratios - kl) * sign > 0).to(ratios.dtype), real),
        "kto/desirable_reward": _mean(beta * ratios, good),
        "kto/undesirable_reward": _mean(beta * ratios, bad),
        "kto/kl": Max(maximum=kl),  # the same in every micro-batch
    }
    if sft_coef:
        nll = -_row_sums(logprobs, mask, average=True)
        per_row = per_row + sft_coef * masked(nll, good)
        metrics["kto/sft_loss"] = _mean(nll, good)
    total, count = masked(per_row, real).sum(), real.sum()
    metrics["kto/loss"] = Mean(total=total.detach(), count=count)
    return LossOutput(total=total, count=count, metrics=metrics)


def _kinds(batch: LabeledBatch, real: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are desirable and which are not, bool [B] each."""
    labels = require(batch.labels, "LabeledBatch.labels")
    if tuple(labels.shape) != (real.shape[0], 1):
        raise ValueError(f"LabeledBatch.labels is {tuple(labels.shape)}, expected {(real.shape[0], 1)}: 1 or -1 for each response")
    return real & (labels[:, 0] > 0), real & (labels[:, 0] < 0)


def _row_sums(x: Tensor, mask: Tensor, *, average: bool) -> Tensor:
    """Sums (or means) over the masked tokens of `x` [B, S], which is 0 elsewhere: [B]."""
    total = x.sum(dim=1)
    return total / mask.sum(dim=1).clamp(min=1) if average else total


def _mean(x: Tensor, rows: Tensor) -> Mean:
    return Mean(total=masked(x.detach(), rows).sum(), count=rows.sum())


def _shaped(logprobs: Tensor | None, mask: Tensor, field: str) -> Tensor:
    found = require(logprobs, field)
    if found.shape != mask.shape:
        raise ValueError(f"{field} is {tuple(found.shape)}, expected {tuple(mask.shape)}: one number per token")
    return found
