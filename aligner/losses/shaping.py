"""Turn the scores of a batch of responses into rewards: clipping, standardisation, scale, over-long penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from aligner.errors import NOT_NEGATIVE, ConfigError, check_numbers, check_range

FLOOR = 1e-8  # of a variance: scores that are all equal become 0


class Standardize(str, Enum):
    """Which mean and standard deviation the scores are given in."""

    none = "none"  # they stay in their own unit
    batch = "batch"  # those of the step's valid scores
    running = "running"  # those of all valid scores since the run began, this step's included


@dataclass(kw_only=True, slots=True)
class ShapingConfig:
    """Settings under `algorithm.shaping.`; the defaults change nothing. They take hold in this order: clip, standardize, scale, shift,
    over-long penalty; so bounds are in the judge's unit, and the penalty in that of the reward used for training.
    """

    clip_low: float | None = None  # smallest score; smaller ones become it; None: off
    clip_high: float | None = None  # largest score; larger ones become it; None: off
    standardize: Standardize = Standardize.none  # by mean and standard deviation of the step's scores, or of all since the run began
    scale: float = 1.0  # factor of the scores
    shift: float = 0.0  # added to the scores, after the scale
    overlong_buffer: int = 0  # tokens before the longest response over which the penalty grows; 0: no penalty
    overlong_penalty: float = 1.0  # taken off a response of the longest length

    def __post_init__(self) -> None:
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        for name, value in {"scale": self.scale, "shift": self.shift, "overlong_penalty": self.overlong_penalty, **bounds}.items():
            if value is not None and not math.isfinite(value):
                raise ConfigError(
                    f"algorithm.shaping.{name}={value}: must be a finite number{' or null for off' if name in bounds else ''}"
                )
        if self.clip_low is not None and self.clip_high is not None and self.clip_low >= self.clip_high:
            raise ConfigError(f"algorithm.shaping.clip_low={self.clip_low}: must be below clip_high={self.clip_high}")
        check_numbers(self, "algorithm.shaping", above_0=("scale",))
        check_range(self, "algorithm.shaping", NOT_NEGATIVE, "overlong_buffer", note=" (0 is off)")
        check_numbers(self, "algorithm.shaping", not_negative=("overlong_penalty",))

    def check_length(self, max_length: int) -> None:
        """Raise ConfigError if the buffer is longer than the longest response allowed, in tokens."""
        if self.overlong_buffer > max_length:
            raise ConfigError(
                f"algorithm.shaping.overlong_buffer={self.overlong_buffer}: must be at most "
                f"rollout.sampling.max_response_length={max_length}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers seen so far (Welford 1962; merged as in Chan et al. 1979).

    `dataclasses.asdict` of it survives JSON to the bit: it is a run's state.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, x: Tensor) -> Moments:
        """With the numbers of x [N], float64, added."""
        if not x.numel():
            return self
        count, mean = self.count + x.numel(), x.mean().item()
        away = mean - self.mean
        squares = self.squares + (x - mean).square().sum().item() + away * away * self.count * x.numel() / count
        return Moments(count=count, mean=self.mean + away * x.numel() / count, squares=squares)

    @property
    def std(self) -> float:
        """Uncorrected; NaN if nothing was seen."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


@torch.no_grad()
def shape(
    scores: Tensor, lengths: Tensor, valid: Tensor, config: ShapingConfig, state: Moments, *, max_length: int
) -> tuple[Tensor, Moments, dict[str, float]]:
    """(rewards [B], the state to continue with, metrics) of the *global* batch's scores, in the order that `ShapingConfig` states.

    scores float [B]; lengths int [B], of responses in tokens; valid bool [B], the rows that have a score: the others take part in no
    statistic and get 0. Standardised is (score - mean) / sqrt(variance + 1e-8), the variance uncorrected. The over-long penalty is
    DAPO's (2503.14476, eq. 13) times `overlong_penalty`: 0 up to max_length - overlong_buffer tokens, from there linearly down to
    -overlong_penalty at `max_length`, the longest response allowed. `state` comes back unchanged unless `standardize` is `running`.

    Metrics, if their setting is on: shaping/{clipped_fraction, mean, std (that were taken out), overlong_fraction, overlong_penalty}.
    Raises ConfigError for an overlong_buffer above `max_length`, ValueError if a valid score is not finite.
    """
    config.check_length(max_length)
    if not scores[valid].isfinite().all():
        raise ValueError(f"{int((~scores[valid].isfinite()).sum())} valid scores are not finite: they have no place in a mean")
    x, metrics = scores.double(), {}
    if config.clip_low is not None or config.clip_high is not None:
        clipped = x.clamp(min=config.clip_low, max=config.clip_high)
        metrics["shaping/clipped_fraction"] = _mean((clipped != x), valid)
        x = clipped
    if config.standardize is not Standardize.none:
        seen = (state if config.standardize is Standardize.running else Moments()).merge(x[valid])
        state = seen if config.standardize is Standardize.running else state
        metrics |= {"shaping/mean": seen.mean if seen.count else math.nan, "shaping/std": seen.std}
        x = (x - seen.mean) / math.sqrt(seen.squares / max(seen.count, 1) + FLOOR)
    x = x * config.scale + config.shift
    if config.overlong_buffer:
        penalty = config.overlong_penalty * overlong(lengths, config.overlong_buffer, max_length)
        metrics |= {"shaping/overlong_fraction": _mean(penalty < 0, valid), "shaping/overlong_penalty": _mean(penalty, valid)}
        x = x + penalty
    return torch.where(valid, x, 0.0).to(scores.dtype), state, metrics


def overlong(lengths: Tensor, buffer: int, max_length: int) -> Tensor:
    """From 0 at max_length - buffer tokens to -1 at max_length, and flat on both sides (2503.14476, eq. 13); float64 [B]."""
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def _mean(x: Tensor, valid: Tensor) -> float:
    """Mean over valid rows; NaN if there are none."""
    return x[valid].double().mean().item()
