"""The gap between the engine's and the trainer's log-probs of the same tokens, over the tokens that the policy wrote.

With l the trainer's log-prob of a token (of the weights that the batch is trained from) and l' the engine's (that sampled it), d = l - l',
w = exp(d). Samples are the engine's, so KL(engine || trainer) is the mean of w - 1 - d and KL(trainer || engine) that of w d - w + 1: k3 of
Schulman 2020 in both directions, never negative. All is 0 (weights: 1) if the two agree; a difference comes from the engine's own
arithmetic, or from weights that are older than the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from aligner.losses.aggregation import masked, masked_mean, maximum, require
from aligner.losses.surrogates import ratios
from aligner.metrics import Distribution, EffectiveSampleSize, Max, Metric, Min
from aligner.types import DistillationBatch, LabeledBatch, LossOutput, PreferenceBatch, TokenOutputs

Sampled = TypeVar("Sampled", PreferenceBatch, LabeledBatch, DistillationBatch)  # batches whose rows may have been sampled


def gap_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Metrics of the gap between two log-probs [B, S] over the tokens of bool `mask`, without gradient:

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
    """Metrics of importance weights [B, S] over the tokens of `mask`: rollout/importance_weight (mean), _max, _min, and
    rollout/effective_sample_size, as a fraction of the number of tokens."""
    weights = masked(weights.detach(), mask).double()  # squares of weights up to e^20
    count = mask.sum()
    return {
        "rollout/importance_weight": masked_mean(weights, mask),
        "rollout/importance_weight_max": Max(maximum=maximum(weights, mask)),
        "rollout/importance_weight_min": Min(minimum=weights.masked_fill(~mask, float("inf")).amin()),
        "rollout/effective_sample_size": EffectiveSampleSize(total=weights.sum(), squares=weights.square().sum(), count=count),
    }
