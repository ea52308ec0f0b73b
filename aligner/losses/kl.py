"""Per-token estimators of KL(policy || reference), and the adaptive coefficient."""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class KLEstimator(str, Enum):
    """Estimators of Schulman 2020, "Approximating KL divergence", with d = logprobs - ref_logprobs on tokens that the policy sampled."""

    k1 = "k1"  # d: unbiased, may be negative
    abs = "abs"  # |d|
    k2 = "k2"  # d^2 / 2: biased, low variance
    k3 = "k3"  # exp(-d) + d - 1: unbiased, never negative


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) per token; any equal shapes; gradient flows into both arguments.

    Positive k1 means that the policy likes the token more than the reference does, so `reward - kl_coef * kl` holds the policy back.
    """
    d = logprobs - ref_logprobs
    if estimator is KLEstimator.k1:
        return d
    if estimator is KLEstimator.abs:
        return d.abs()
    if estimator is KLEstimator.k2:
        return 0.5 * d.square()
    if estimator is KLEstimator.k3:
        return (-d).exp() + d - 1.0
    raise ValueError(f"kl_estimator is {estimator!r}, expected one of {[e.value for e in KLEstimator]}")


def adapt_kl_coef(kl_coef: float, observed_kl: float, target: float, horizon: float, num_samples: int) -> float:
    """The next coefficient (Ziegler 2019, 1909.08593): kl_coef * (1 + clip(observed_kl / target - 1, -0.2, 0.2) * num_samples / horizon).

    `num_samples` is the number of rollouts since the last update, `horizon` is in the same unit. Raises ValueError for a target or horizon
    that is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adapt_kl_coef wants target > 0 and horizon > 0, got target {target}, horizon {horizon}")
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)
