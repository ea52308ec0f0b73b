"""The clipped policy-gradient loss of PPO, with the options that GRPO, Dr. GRPO and DAPO add to it."""

from __future__ import annotations

from torch import Tensor

from aligner.losses.aggregation import Aggregation, aggregate, masked, masked_mean, maximum, require
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.metrics import Max, Mean, Metric
from aligner.types import LossOutput, PolicyBatch, TokenOutputs

# exp(20) = 5e8: far outside every clip range. Without the bound an overflowing ratio meets the zero gradient of the clipped branch as
# 0 * inf = NaN. Such a token gets no gradient; `policy/ratio_mean` shows that it was there.
MAX_LOG_RATIO = 20.0


def ppo_policy_loss(
    outputs: TokenOutputs,
    batch: PolicyBatch,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    aggregation: Aggregation,
    aggregation_constant: float | None = None,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = KLEstimator.k3,
) -> LossOutput:
    """PPO (1707.06347), per masked token with r = exp(logprobs - old_logprobs), then aggregated:

        max(-A r, -A clip(r, 1 - clip_eps_low, 1 + clip_eps_high)) - entropy_coef * H + kl_coef * KL(policy || reference)

    `dual_clip` c > 1 bounds the first term by -c A where A < 0 (1912.09729). `clip_eps_high` > `clip_eps_low` is DAPO's clip-higher
    (2503.14476). The KL term carries gradient: for a KL inside the reward leave `kl_coef` 0 here. `aggregation_constant`: see `aggregate`.

    Reads outputs.logprobs, and outputs.entropy (needed where entropy_coef != 0), all [B, S] at the sampling temperature; batch.ref_logprobs
    is needed where kl_coef != 0. Raises ValueError naming a missing field, or a dual_clip <= 1.
    Metrics: policy/{loss, clip_fraction, approx_kl, ratio_mean}; with their inputs policy/{ref_kl, entropy} and rollout/logprob_gap*.
    """
    mask = batch.loss_mask
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), mask)
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = (logprobs - masked(old_logprobs, mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = masked(batch.advantages, mask)
    per_token = _surrogate(ratio, advantages, clip_eps_low, clip_eps_high, dual_clip)
    metrics: dict[str, Metric] = {}
    if entropy_coef or outputs.entropy is not None:
        entropy = masked(require(outputs.entropy, "TokenOutputs.entropy"), mask)
        metrics["policy/entropy"] = masked_mean(entropy, mask)
        per_token = per_token - entropy_coef * entropy if entropy_coef else per_token
    if kl_coef or batch.ref_logprobs is not None:
        ref_logprobs = masked(require(batch.ref_logprobs, "PolicyBatch.ref_logprobs"), mask)
        kl = kl_estimate(logprobs, ref_logprobs, kl_estimator)
        metrics["policy/ref_kl"] = masked_mean(kl, mask)
        per_token = per_token + kl_coef * kl if kl_coef else per_token
    total, count = aggregate(per_token, mask, aggregation, aggregation_constant)
    clipped = ((advantages > 0) & (ratio > 1 + clip_eps_high)) | ((advantages < 0) & (ratio < 1 - clip_eps_low))
    metrics["policy/loss"] = Mean(total=total.detach(), count=count)
    metrics["policy/clip_fraction"] = masked_mean(clipped.to(ratio.dtype), mask)
    metrics["policy/approx_kl"] = masked_mean(kl_estimate(old_logprobs, logprobs, KLEstimator.k3), mask)
    metrics["policy/ratio_mean"] = masked_mean(ratio, mask)
    return LossOutput(total=total, count=count, metrics=metrics | _engine_gap(batch, old_logprobs))


def _surrogate(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None) -> Tensor:
    """The clipped objective per token, negated; [B, S]."""
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = (-advantages * ratio).maximum(-advantages * clipped)
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}, expected a number > 1 or None")
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


def _engine_gap(batch: PolicyBatch, old_logprobs: Tensor) -> dict[str, Metric]:
    """How far the sampler's log-probs are from the trainer's on the same tokens and weights (0 where the two agree)."""
    if batch.rollout_logprobs is None:
        return {}
    mask = batch.loss_mask
    gap = (masked(old_logprobs, mask) - masked(batch.rollout_logprobs, mask)).abs()
    kl = kl_estimate(batch.rollout_logprobs, old_logprobs, KLEstimator.k3)
    return {
        "rollout/logprob_gap": masked_mean(gap, mask),
        "rollout/logprob_gap_max": Max(maximum=maximum(gap, mask)),
        "rollout/logprob_kl": masked_mean(kl, mask),
    }
