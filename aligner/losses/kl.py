"""Per-token estimators of KL(policy || reference), and the adaptive coefficient."""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class KLEstimator(str, Enum):
    """Estimators of Schulman 2020, "Approximating KL divergence", with d = logprobs - ref_logprobs on tokens that the policy sampled.

    As a number all but `abs` are near KL(policy || reference). As a term of the loss they are something else, because their gradient is
    not the gradient of what they estimate (2506.09477, 2510.01555). What it is on average, for samples of the policy itself:

    - k1: zero. It does not restrain the policy and adds noise.
    - abs: towards the reference at a constant rate, however far away.
    - k2: d * grad log-prob, the gradient of KL(policy || reference). The one to choose; REINFORCE++'s -baseline variant does.
    - k3: (1 - exp(-d)) * grad log-prob, the gradient of KL(reference || policy). GRPO's choice; the same as k2 for small d, at most 1 and
      unbounded below for large ones.

    Inside the reward no gradient flows through the estimate, and k1 there is k2 in the loss, with the KL of later tokens on top, which a
    term of the loss leaves out.
    """

    k1 = "k1"  # d: unbiased, may be negative; for the reward
    abs = "abs"  # |d|
    k2 = "k2"  # d^2 / 2: biased, low variance; for the loss
    k3 = "k3"  # exp(-d) + d - 1: unbiased, never negative


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) per token; any equal shapes; gradient flows into both arguments (for what it is, see `KLEstimator`).

    Positive k1 means that the policy likes the token more than the reference does, so `reward - kl_coef * kl` penalises it.
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
        raise ValueError(f"adapt_kl_coef needs target > 0 and horizon > 0, got target {target}, horizon {horizon}")
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)
