"""The policy-gradient loss: a surrogate of the objective's choice, with what GRPO, Dr. GRPO, DAPO and their variants add to it."""

from __future__ import annotations

from aligner.losses.aggregation import Aggregation, aggregate, masked, masked_mean, require
from aligner.losses.correction import Correction, CorrectionConfig, correction_weights
from aligner.losses.gap import gap_metrics
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.losses.surrogates import Clip, Objective, Surrogate, ratios, surrogate
from aligner.metrics import Mean, Metric
from aligner.types import LossOutput, PolicyBatch, TokenOutputs


def policy_loss(
    outputs: TokenOutputs,
    batch: PolicyBatch,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    aggregation: Aggregation,
    aggregation_constant: float | None = None,
    objective: Objective | Surrogate = Objective.ppo,
    dual_clip: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = KLEstimator.k3,
    correction: CorrectionConfig | None = None,
) -> LossOutput:
    """Per masked token with d = logprobs - old_logprobs, then aggregated:

        w * surrogate(objective, d, A) - entropy_coef * H + kl_coef * KL(policy || reference)

    PPO's surrogate is max(-A r, -A clip(r, 1 - clip_eps_low, 1 + clip_eps_high)), r = exp(d) (1707.06347); the others and `dual_clip` are
    in `aligner.losses.surrogates`. `clip_eps_high` > `clip_eps_low` is DAPO's clip-higher (2503.14476). w is `correction`'s factor for a
    sampler that differs from the trainer. The KL term carries gradient: for a KL inside the reward leave `kl_coef` 0 here.
    `aggregation_constant`: see `aggregate`.

    Reads outputs.logprobs, and outputs.entropy (needed if entropy_coef != 0), all [B, S] at the sampling temperature; batch.ref_logprobs
    is needed if kl_coef != 0, batch.rollout_logprobs if a correction is set. Raises ValueError naming a missing field, or a
    dual_clip <= 1. Metrics: policy/{loss, clip_fraction, approx_kl, ratio_mean}; with their inputs policy/{ref_kl, entropy},
    those of `losses.gap` and, with a correction, rollout/corrected_fraction.
    """
    mask = batch.loss_mask
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), mask)
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratios = logprobs - masked(old_logprobs, mask)
    clip = Clip(low=clip_eps_low, high=clip_eps_high, dual=dual_clip, tau_pos=tau_pos, tau_neg=tau_neg)
    per_token, clipped = surrogate(objective, log_ratios, masked(batch.advantages, mask), mask, clip)
    metrics: dict[str, Metric] = {}
    if batch.rollout_logprobs is not None:
        metrics = gap_metrics(masked(old_logprobs, mask), masked(batch.rollout_logprobs, mask), mask)
    if correction is not None and correction.kind is not Correction.none:
        rollout_logprobs = require(batch.rollout_logprobs, "PolicyBatch.rollout_logprobs")
        factors, weighing = correction_weights(masked(old_logprobs, mask), masked(rollout_logprobs, mask), mask, correction)
        metrics |= weighing  # weights at the correction's level in the place of tokens' own
        per_token = per_token * factors
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
    metrics["policy/loss"] = Mean(total=total.detach(), count=count)
    metrics["policy/clip_fraction"] = masked_mean(clipped.to(logprobs.dtype), mask)
    metrics["policy/approx_kl"] = masked_mean(kl_estimate(old_logprobs, logprobs, KLEstimator.k3), mask)
    metrics["policy/ratio_mean"] = masked_mean(ratios(log_ratios), mask)
    return LossOutput(total=total, count=count, metrics=metrics)
