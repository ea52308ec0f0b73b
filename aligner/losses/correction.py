"""Weights that correct for a sampler whose probabilities are not the trainer's: another engine's arithmetic, or older weights.

Samples come from the engine's distribution, gradients are taken as if they came from the trainer's: importance weights
w = exp(old_logprobs - rollout_logprobs) make up for it, and grow without bound. So they are truncated (TIS, Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training") or dropped outside a band (IcePop, Ling team 2025).

`gap_metrics` says how far the engine's log-probs are from the trainer's on the same tokens. With l the trainer's log-prob of a token (of
the weights that the batch is trained from) and l' the engine's (that sampled it), d = l - l', w = exp(d). Samples are the engine's, so
KL(engine || trainer) is the mean of w - 1 - d and KL(trainer || engine) that of w d - w + 1: k3 of Schulman 2020 in both directions, never
negative. All is 0 (weights: 1) where the two agree; a difference comes from the engine's own arithmetic, or from weights that are older
than the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.aggregation import masked, masked_mean, require
from aligner.telemetry.metrics import Distribution, EffectiveSampleSize, Max, Mean, Metric, Min
from aligner.types import DistillationBatch, LabeledBatch, LossOutput, PreferenceBatch, TokenOutputs

# exp(20) = 5e8: far outside every clip range. Without the bound an overflowing ratio meets the zero gradient of the clipped branch as
# 0 * inf = NaN. Such a token gets no gradient; `policy/ratio_mean` shows that it was there.
MAX_LOG_RATIO = 20.0
Sampled = TypeVar("Sampled", PreferenceBatch, LabeledBatch, DistillationBatch)  # batches whose rows may have been sampled


def ratios(log_ratios: Tensor) -> Tensor:
    """exp, bounded: see MAX_LOG_RATIO."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def gap_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """What is reported of two log-probs [B, S] over the tokens of bool `mask`, without gradient:

    rollout/logprob_gap (mean of |d|), _max and, within 1.6%, _p50, _p90, _p99, _p999; rollout/logprob_kl (engine || trainer),
    rollout/logprob_kl_reverse (trainer || engine); the weights w as `weight_metrics` has them.
    """
    log_weights = masked(old_logprobs.detach() - rollout_logprobs, mask).double()  # w - 1 - d of small d cancels
    weights = ratios(log_weights)
    metrics: dict[str, Metric] = {
        "rollout/logprob_gap": Distribution.of(log_weights.abs(), mask),
        "rollout/logprob_kl": masked_mean(log_weights.expm1() - log_weights, mask),
        "rollout/logprob_kl_reverse": masked_mean(weights * log_weights - log_weights.expm1(), mask),
    }
    return metrics | weight_metrics(weights, mask)


def with_gap(loss: Callable[[TokenOutputs, Sampled], LossOutput]) -> Callable[[TokenOutputs, Sampled], LossOutput]:
    """`loss` plus `gap_metrics` for batches that have rollout_logprobs, that is, in the first update after sampling."""

    def watched(outputs: TokenOutputs, batch: Sampled) -> LossOutput:
        result = loss(outputs, batch)
        if batch.rollout_logprobs is None:
            return result
        mask = batch.loss_mask
        logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), mask)
        gap = gap_metrics(logprobs, masked(batch.rollout_logprobs, mask), mask)
        return LossOutput(total=result.total, count=result.count, metrics={**result.metrics, **gap})

    return watched


def weight_metrics(weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Of importance weights [B, S] over the tokens of `mask`: rollout/importance_weight (mean), _max, _min, and
    rollout/effective_sample_size, the part of the tokens that as many equal weights would stand for."""
    weights = masked(weights.detach(), mask).double()  # squares of weights up to e^20
    count = mask.sum()
    return {
        "rollout/importance_weight": masked_mean(weights, mask),
        "rollout/importance_weight_max": Max(maximum=weights.amax()),
        "rollout/importance_weight_min": Min(minimum=weights.masked_fill(~mask, float("inf")).amin()),
        "rollout/effective_sample_size": EffectiveSampleSize(total=weights.sum(), squares=weights.square().sum(), count=count),
    }


class Correction(str, Enum):
    """How the weight changes a token's loss."""

    none = "none"
    tis = "tis"  # times min(w, high) (TIS)
    icepop = "icepop"  # times w where low <= w <= high, else 0 (IcePop)
    mis = "mis"  # as it is where low <= w <= high, else 0 (masked importance sampling)


class Level(str, Enum):
    """Whose weight it is."""

    token = "token"
    sequence = "sequence"  # the product over the response
    sequence_mean = "sequence_mean"  # its geometric mean


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """The correction of the gap between engine and trainer."""

    kind: Correction = Correction.none  # what the weight trainer probability / engine probability does to a loss (docs/agreement.md)
    level: Level = Level.token  # whose weight: of each token, of the whole response (a product), or their geometric mean
    low: float = 0.5  # of `icepop` and `mis`: smallest weight that counts
    high: float = 2.0  # largest weight that counts

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise ConfigError(f"algorithm.correction.low={self.low}, high={self.high}: need 0 <= low < 1 < high")


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """(factor of every token's loss [B, S], without gradient; 1 everywhere for `none`), and metrics.

    Both log-probs [B, S] at the sampling temperature, on the same tokens. The count that a loss is divided by stays that of all tokens.
    Metrics, also of what is not corrected: those of `weight_metrics`, and rollout/corrected_fraction of tokens whose factor is not their
    weight (`tis`, `icepop`) or not 1 (`mis`).
    """
    log_weights = masked(old_logprobs.detach() - rollout_logprobs, mask)
    if config.level is not Level.token:
        sums = log_weights.sum(dim=1, keepdim=True)
        log_weights = masked(
            (sums / mask.sum(dim=1, keepdim=True).clamp(min=1) if config.level is Level.sequence_mean else sums) + 0 * log_weights, mask
        )
    weights = ratios(log_weights)
    inside = (weights >= config.low) & (weights <= config.high)
    if config.kind is Correction.tis:
        factors, corrected = weights.clamp(max=config.high), weights > config.high
    elif config.kind is Correction.icepop:
        factors, corrected = weights * inside, ~inside
    elif config.kind is Correction.mis:
        factors, corrected = inside.to(weights.dtype), ~inside
    else:
        factors, corrected = weights.new_ones(weights.shape), mask & False
    corrected_fraction = Mean(total=(corrected & mask).sum(), count=mask.sum())
    return factors, weight_metrics(weights, mask) | {"rollout/corrected_fraction": corrected_fraction}
