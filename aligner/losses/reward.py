"""Pairwise (Bradley-Terry) losses of reward models."""

from __future__ import annotations

from enum import Enum

from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.losses.aggregation import require
from aligner.metrics import Mean, Metric
from aligner.types import LossOutput, PreferenceBatch, TokenOutputs


class BradleyTerry(str, Enum):
    """What the annotated margin m of a pair does; d is the score of the chosen response minus that of the rejected one."""

    standard = "standard"  # -log sigma(d): nothing
    margin = "margin"  # -log sigma(d - |m|) (Llama 2, 2307.09288)
    scaled = "scaled"  # -|m| log sigma(d) (HelpSteer2-Preference, 2410.01257)


def bradley_terry_loss(outputs: TokenOutputs, batch: PreferenceBatch, *, variant: BradleyTerry, centre_coef: float = 0.0) -> LossOutput:
    """Sum over pairs of the variant's loss + centre_coef * (s_chosen + s_rejected)^2 (2312.09244); count: pairs.

    Reads outputs.scores [2P, 1], rows chosen and rejected interleaved, and batch.margins [P]. A pair whose rows both have an empty
    loss_mask is filler and counts nothing. Raises ValueError for scores that are missing or of another shape.
    Metrics over pairs: reward/{loss, accuracy, margin, chosen_mean, rejected_mean}; a tie is not accurate.
    """
    scores = require(outputs.scores, "TokenOutputs.scores")
    rows = batch.tokens.shape[0]
    if tuple(scores.shape) != (rows, 1):
        raise ValueError(f"TokenOutputs.scores is {tuple(scores.shape)}, expected {(rows, 1)}: one score per row, rows in pairs")
    real = batch.loss_mask.any(dim=1).view(-1, 2).any(dim=1)
    chosen, rejected = scores.view(-1, 2).masked_fill(~real[:, None], 0.0).unbind(dim=1)
    margins = batch.margins.abs().masked_fill(~real, 0.0)
    per_pair = _pair_loss(chosen - rejected, margins, variant)
    if centre_coef:
        per_pair = per_pair + centre_coef * (chosen + rejected).square()
    total, count = per_pair.masked_fill(~real, 0.0).sum(), real.sum()
    means = {
        "reward/accuracy": (chosen > rejected).to(scores.dtype),
        "reward/margin": chosen - rejected,
        "reward/chosen_mean": chosen,
        "reward/rejected_mean": rejected,
    }
    metrics: dict[str, Metric] = {name: Mean(total=x.detach().sum(), count=count) for name, x in means.items()}
    metrics["reward/loss"] = Mean(total=total.detach(), count=count)
    return LossOutput(total=total, count=count, metrics=metrics)


def _pair_loss(difference: Tensor, margins: Tensor, variant: BradleyTerry) -> Tensor:
    """Loss per pair [P] from score differences and non-negative margins."""
    if variant is BradleyTerry.standard:
        return -logsigmoid(difference)
    if variant is BradleyTerry.margin:
        return -logsigmoid(difference - margins)
    if variant is BradleyTerry.scaled:
        return -margins * logsigmoid(difference)
    raise ValueError(f"variant is {variant!r}, expected one of {[v.value for v in BradleyTerry]}")
