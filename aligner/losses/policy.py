"""The policy-gradient loss: a surrogate of the objective's choice, with what GRPO, Dr. GRPO, DAPO and their kin add to it.

A surrogate stands in the place of `-advantage * log-prob`: PPO's clipped ratio and its successors, per token. Each takes log-ratios d =
logprobs - old_logprobs [B, S] (with gradient, 0 outside the mask), advantages [B, S] and the mask, and gives the loss of every token and
where its clipping took hold, both [B, S]. Sequence-level objectives give each token its sequence's loss, so that
`Aggregation.sequence_mean` is the mean over sequences that their papers have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from aligner.losses.aggregation import Aggregation, aggregate, checked_loss, masked, masked_mean, refuse_result, require
from aligner.losses.correction import Correction, CorrectionConfig, correction_weights, gap_metrics, ratios
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import LossOutput, PolicyBatch, TokenOutputs


class Objective(str, Enum):
    """Which surrogate the policy descends on."""

    ppo = "ppo"  # clipped ratio of a token (1707.06347)
    gspo = "gspo"  # one ratio per sequence, the geometric mean of its tokens' (2507.18071)
    gspo_token = "gspo_token"  # the same ratio, with advantages and gradients of single tokens (2507.18071, eq. 13)
    cispo = "cispo"  # the clipped ratio is a weight without gradient: no token is dropped (2506.13585)
    gmpo = "gmpo"  # geometric mean of tokens' clipped ratios (2507.20673)
    sapo = "sapo"  # a sigmoid gate in place of the clip (2511.20347)
    reinforce = "reinforce"  # -advantage * log-prob: no ratio (Williams 1992)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Bounds: ratios stay in [1 - low, 1 + high]; GMPO's log-ratios in [-low, high]. `dual` c > 1 bounds PPO's loss by -c A if A < 0
    (1912.09729). `tau_pos`, `tau_neg`: the steepness of SAPO's gate for either sign of the advantage."""

    low: float
    high: float
    dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual_clip is {self.dual}, expected a number > 1 or None")


Surrogate = Callable[[Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]


def surrogate(objective: Objective | Surrogate, log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(loss per token with gradient, bool where clipped), [B, S], of ours or a user's function (UserCodeError for what is none)."""
    if isinstance(objective, Objective):
        return _SURROGATES[objective](log_ratios, advantages, mask, clip)
    found = objective(log_ratios, advantages, mask, clip)
    shapes = [tuple(one.shape) for one in found] if isinstance(found, tuple) and all(isinstance(one, Tensor) for one in found) else []
    if shapes != [tuple(log_ratios.shape)] * 2 or found[1].dtype != torch.bool:
        refuse_result(objective, shapes or found, f"(loss per token, bool where it was clipped), both {tuple(log_ratios.shape)}")
    return checked_loss(objective, masked(found[0], mask), masked(log_ratios, mask)), found[1] & mask


def _ppo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and for A < 0 at most -c A."""
    ratio = ratios(log_ratios)
    loss = (-advantages * ratio).maximum(-advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    if clip.dual is not None:
        loss = loss.minimum(-clip.dual * advantages).where(advantages < 0, loss)
    # Where the clipped branch is the larger loss no gradient flows.
    return loss, ((advantages > 0) & (ratio > 1 + clip.high)) | ((advantages < 0) & (ratio < 1 - clip.low))


def _gspo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's loss of s = exp(mean over the sequence's tokens of d), in the place of every token's own ratio."""
    loss, clipped = _ppo(_sequence_mean(log_ratios, mask)[:, None].expand_as(log_ratios), advantages, mask, replace(clip, dual=None))
    return loss, clipped & mask


def _gspo_token(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's loss of sg(s) * exp(d - sg(d)): the sequence's ratio in value, the token's own in gradient."""
    sequence = _sequence_mean(log_ratios.detach(), mask)[:, None]
    return _ppo(sequence + log_ratios - log_ratios.detach(), advantages, mask, replace(clip, dual=None))


def _cispo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-sg(min(r, 1 + high)) * A * log-prob; d has the log-prob's gradient. Its value is shifted by a constant."""
    ratio = ratios(log_ratios.detach())
    return -ratio.clamp(max=1.0 + clip.high) * advantages * log_ratios, ratio > 1.0 + clip.high


def _gmpo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-A exp(mean of the tokens' log-ratios, each clipped to [-low, high] on the side that its advantage's sign makes too good)."""
    sign = advantages.sign()
    kept = sign * (sign * log_ratios).minimum(sign * log_ratios.clamp(-clip.low, clip.high))
    ratio = ratios(_sequence_mean(kept, mask))
    mean_advantage = _sequence_mean(advantages, mask)
    return (-mean_advantage * ratio)[:, None].expand_as(log_ratios), kept.detach() != log_ratios.detach()


def _sapo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-A * sigmoid(tau (r - 1)) * 4 / tau: the slope at r = 1 is that of the ratio, and falls off smoothly on both sides."""
    tau = torch.where(advantages > 0, clip.tau_pos, clip.tau_neg)
    return -advantages * torch.sigmoid(tau * (ratios(log_ratios) - 1.0)) * 4.0 / tau, torch.zeros_like(mask)


_SURROGATES: dict[Objective, Surrogate] = {
    Objective.ppo: _ppo,
    Objective.gspo: _gspo,
    Objective.gspo_token: _gspo_token,
    Objective.cispo: _cispo,
    Objective.gmpo: _gmpo,
    Objective.sapo: _sapo,
    # -A * log-prob; d has its gradient. Its value is shifted by a constant.
    Objective.reinforce: lambda log_ratios, advantages, mask, clip: (-advantages * log_ratios, torch.zeros_like(mask)),
}


def _sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [B, S] over each row's masked tokens, [B]; 0 for a row without any."""
    return masked(x, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


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
    in `aligner.losses.policy`. `clip_eps_high` > `clip_eps_low` is DAPO's clip-higher (2503.14476). w is `correction`'s factor for a
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
    total, count = aggregate(per_token, mask, aggregation, aggregation_constant, of=batch)
    metrics["policy/loss"] = Mean(total=total.detach(), count=count)
    metrics["policy/clip_fraction"] = masked_mean(clipped.to(logprobs.dtype), mask)
    metrics["policy/approx_kl"] = masked_mean(kl_estimate(old_logprobs, logprobs, KLEstimator.k3), mask)
    metrics["policy/ratio_mean"] = masked_mean(ratios(log_ratios), mask)
    return LossOutput(total=total, count=count, metrics=metrics)
