"""Losses of reward models: of pairs (Bradley-Terry), of attributes with numbers (regression), of the steps of a response (process)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.losses.aggregation import masked, masked_mean, require
from aligner.losses.preference import pair_output, real_pairs
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import LabeledBatch, LossOutput, PreferenceBatch, TokenOutputs

MISSING_LABEL = -100.0  # of an attribute that nobody judged


class BradleyTerry(str, Enum):
    """How the annotated margin m of a pair is used; d is the score of the chosen response minus that of the rejected one."""

    standard = "standard"  # -log sigma(d): nothing
    margin = "margin"  # -log sigma(d - |m|) (Llama 2, 2307.09288)
    scaled = "scaled"  # -|m| log sigma(d) (HelpSteer2-Preference, 2410.01257)


def bradley_terry_loss(outputs: TokenOutputs, batch: PreferenceBatch, *, variant: BradleyTerry, centre_coef: float = 0.0) -> LossOutput:
    """Sum over pairs of the variant's loss + centre_coef * (s_chosen + s_rejected)^2 (2312.09244); count: pairs.

    Reads outputs.scores [2P, 1], rows chosen and rejected interleaved, and batch.margins [P]. A pair whose rows both have an empty
    loss_mask is filler and counts nothing. Raises ValueError for scores that are missing or of another shape.
    Metrics over pairs: reward/{loss, accuracy, margin, chosen_mean, rejected_mean}; a tie is not accurate.
    """
    scores = require(outputs.scores, "TokenOutputs.scores", (batch.tokens.shape[0], 1), "one score per row, rows in pairs")
    real = real_pairs(batch.loss_mask)
    chosen, rejected = scores.view(-1, 2).masked_fill(~real[:, None], 0.0).unbind(dim=1)
    margins = batch.margins.abs().masked_fill(~real, 0.0)
    per_pair = _pair_loss(chosen - rejected, margins, variant)
    if centre_coef:
        per_pair = per_pair + centre_coef * (chosen + rejected).square()
    means = {
        "reward/accuracy": (chosen > rejected).to(scores.dtype),
        "reward/margin": chosen - rejected,
        "reward/chosen_mean": chosen,
        "reward/rejected_mean": rejected,
    }
    return pair_output(per_pair, real, "reward/loss", means, {})


def _pair_loss(difference: Tensor, margins: Tensor, variant: BradleyTerry) -> Tensor:
    if variant is BradleyTerry.standard:
        return -logsigmoid(difference)
    if variant is BradleyTerry.margin:
        return -logsigmoid(difference - margins)
    if variant is BradleyTerry.scaled:
        return -margins * logsigmoid(difference)
    raise ValueError(f"variant is {variant!r}, expected one of {[v.value for v in BradleyTerry]}")


def regression_loss(outputs: TokenOutputs, batch: LabeledBatch, *, attributes: Sequence[str] = ()) -> LossOutput:
    """Sum of (score - label)^2 over the labels that are there (not MISSING_LABEL); count: those labels (HelpSteer, 2311.09528).

    Reads outputs.scores and batch.labels, both [B, K]. A row with an empty loss_mask is filler and counts nothing. Every label weighs the
    same, so an attribute weighs as much as it has labels. Raises ValueError for scores or labels that are missing or differ in shape.
    Metrics over labels: reward/{loss, absolute_error, score_mean, label_mean}, and reward/mse_<name> for each of the K `attributes` named.
    """
    labels = require(batch.labels, "LabeledBatch.labels")
    scores = require(outputs.scores, "TokenOutputs.scores", labels.shape, "one score per label")
    if attributes and len(attributes) != labels.shape[1]:
        raise ValueError(f"there are {len(attributes)} attributes, expected {labels.shape[1]}: one name per label of a row")
    there = (labels != MISSING_LABEL) & batch.loss_mask.any(dim=1, keepdim=True)
    errors = masked(scores, there) - masked(labels, there).to(scores.dtype)
    squares, absolute = errors.square(), errors.abs()
    metrics: dict[str, Metric] = {
        "reward/loss": masked_mean(squares, there),
        "reward/absolute_error": masked_mean(absolute, there),
        "reward/score_mean": masked_mean(scores, there),
        "reward/label_mean": masked_mean(labels, there),
    }
    for column, name in enumerate(attributes):
        metrics[f"reward/mse_{name}"] = masked_mean(squares[:, column], there[:, column])
    return LossOutput(total=squares.sum(), count=there.sum(), metrics=metrics)


def step_loss(scores: Tensor, labels: Tensor, mask: Tensor) -> LossOutput:
    """Binary cross-entropy of sigma(score) at the ends of steps; count: steps (process reward models, 2305.20050, 2312.08935).

    `scores` float [B, S]: the score of the step that ends at token t, from the hidden state after t; `labels` [B, S]: 1 for a good step,
    0 for a bad one, or the share of continuations from there that reached the right answer; `mask` bool [B, S]: True on the
    last token of each labelled step. Raises ValueError if the shapes differ.
    Metrics over steps: reward/{loss, accuracy, score_mean}; a step counts as good if its score is above 0.
    """
    if not scores.shape == labels.shape == mask.shape:
        shapes = f"scores {tuple(scores.shape)}, labels {tuple(labels.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes}: expected one score and one label per token")
    scores, labels = masked(scores, mask), masked(labels, mask).to(scores.dtype)
    per_step = masked(-labels * logsigmoid(scores) - (1 - labels) * logsigmoid(-scores), mask)
    total, count = per_step.sum(), mask.sum()
    right = ((scores > 0) == (labels > 0.5)).to(scores.dtype)
    metrics: dict[str, Metric] = {
        "reward/loss": Mean(total=total.detach(), count=count),
        "reward/accuracy": masked_mean(right, mask),
        "reward/score_mean": masked_mean(scores, mask),
    }
    return LossOutput(total=total, count=count, metrics=metrics)
