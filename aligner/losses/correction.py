"""Weights that correct for a sampler whose probabilities are not the trainer's: another engine's arithmetic, or older weights.

Samples come from the engine's distribution, gradients are taken as if they came from the trainer's: importance weights
w = exp(old_logprobs - rollout_logprobs) make up for it, and grow without bound. So they are truncated (TIS, Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training") or dropped outside a band (IcePop, Ling team 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.aggregation import masked
from aligner.losses.gap import weight_metrics
from aligner.losses.surrogates import ratios
from aligner.metrics import Mean, Metric


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
