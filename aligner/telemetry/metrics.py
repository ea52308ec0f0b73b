"""Metrics that carry their own reduction, so that no mean of means can happen.

A loss reports `Mean(total, count)`, never an average; `merge` adds totals and counts over micro-batches, and
`aligner.parallel.collectives.reduce_metrics` over data-parallel ranks. Names are `area/quantity`; a `Distribution` gives several.

Every kind lists what is added up over ranks (`sums`) and what is maximised (`tops`), and is made of the results again (`rebuilt`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

Scalar = float | int | torch.Tensor


def _number(x: Scalar) -> float:
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


class _Reduced:
    """What all kinds share: `ADDED` fields are added up, over parts and over ranks, and of `TOPPED` ones the largest stays."""

    __slots__ = ()
    ADDED: ClassVar[tuple[str, ...]] = ()
    TOPPED: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Self) -> Self:
        """Both in one."""
        added = {name: getattr(self, name) + getattr(other, name) for name in self.ADDED}
        topped = {name: _larger(getattr(self, name), getattr(other, name)) for name in self.TOPPED}
        return type(self)(**added, **topped)

    @property
    def sums(self) -> list[float]:
        return [_number(getattr(self, name)) for name in self.ADDED]

    @property
    def tops(self) -> list[float]:
        return [_number(getattr(self, name)) for name in self.TOPPED]

    def rebuilt(self, sums: Sequence[float], tops: Sequence[float]) -> Self:
        """This kind of metric with these numbers, as `sums` and `tops` have them."""
        return type(self)(**dict(zip(self.ADDED, sums, strict=True)), **dict(zip(self.TOPPED, tops, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean(_Reduced):
    """`total / count` over everything merged into it."""

    ADDED: ClassVar[tuple[str, ...]] = ("total", "count")
    total: Scalar
    count: Scalar

    def value(self) -> float:
        """The mean; NaN if nothing was counted."""
        count = _number(self.count)
        return _number(self.total) / count if count else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum(_Reduced):
    """The sum over everything merged into it."""

    ADDED: ClassVar[tuple[str, ...]] = ("total",)
    total: Scalar

    def value(self) -> float:
        return _number(self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Max(_Reduced):
    """The maximum over everything merged into it."""

    TOPPED: ClassVar[tuple[str, ...]] = ("maximum",)
    maximum: Scalar

    def value(self) -> float:
        return _number(self.maximum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Min(_Reduced):
    """The minimum over everything merged into it."""

    minimum: Scalar

    def merge(self, other: Self) -> Self:
        return type(self)(minimum=-_larger(-self.minimum, -other.minimum))

    def value(self) -> float:
        return _number(self.minimum)

    @property
    def tops(self) -> list[float]:
        return [-_number(self.minimum)]

    def rebuilt(self, sums: Sequence[float], tops: Sequence[float]) -> Self:
        return type(self)(minimum=-tops[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveSampleSize(_Reduced):
    """(sum w)^2 / sum w^2 / n of n importance weights w (Kish 1965): 1 if all are equal, 1/n if one outweighs all others."""

    ADDED: ClassVar[tuple[str, ...]] = ("total", "squares", "count")
    total: Scalar
    squares: Scalar
    count: Scalar

    def value(self) -> float:
        """From 0 to 1; NaN if nothing was counted, or no weight is above 0."""
        total, squares, count = self.sums
        return total * total / squares / count if squares and count else float("nan")


# Float32 numbers are sorted by their bits: those of the exponent, and the first of the mantissa.
_MANTISSA_BITS = 5  # 32 bins from one power of two to the next
_SHIFT = 23 - _MANTISSA_BITS
_LEAST, _MOST = 2.0**-30, 2.0**8
_FIRST = (127 - 30) << _MANTISSA_BITS  # of the bits of _LEAST
NUM_BINS = ((30 + 8) << _MANTISSA_BITS) + 2  # one for what is below, one for what is above or not finite
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution(Mean):
    """Mean, maximum and quantiles of numbers that are not negative. How many are in each of `NUM_BINS` bins (int64 `bins`) merges exactly.

    Bins split every octave from 2^-30 to 2^8 into 32 equal parts; a quantile is the middle of its bin, so within 1.6% of the exact one.
    Smaller numbers count as 0 there, larger ones and those that are not finite as infinite. `values` reports the mean under the metric's
    name, and `<name>_max`, `<name>_p50` and so on (QUANTILES).
    """

    ADDED: ClassVar[tuple[str, ...]] = ("total", "count", "bins")
    TOPPED: ClassVar[tuple[str, ...]] = ("maximum",)
    maximum: Scalar
    bins: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, mask: torch.Tensor) -> Distribution:
        """Of the entries of float `x` (any shape) that bool `mask` selects. Waits for nothing on an accelerator."""
        x = x.detach().float().masked_fill(~mask, 0.0)
        bits = x.contiguous().view(torch.int32) & 0x7FFFFFFF  # -0 is 0
        places = ((bits >> _SHIFT) - (_FIRST - 1)).clamp_(0, NUM_BINS - 1).long().flatten()
        bins = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device).index_add_(0, places, mask.flatten().long())
        return cls(total=x.sum(), count=mask.sum(), maximum=x.amax() if x.numel() else 0.0, bins=bins)

    def quantile(self, q: float) -> float:
        """The middle of the first bin up to whose end a part `q` of the numbers lies; NaN without numbers."""
        cumulated = self.bins.cumsum(0)
        total = int(cumulated[-1])
        if not total:
            return float("nan")
        rank = max(1, math.ceil(q * total * (1 - 1e-12)))  # not one more if the exact product is whole and that of floats is not
        return _middle(int(torch.searchsorted(cumulated, rank)))

    @property
    def sums(self) -> list[float]:
        return [_number(self.total), _number(self.count), *self.bins.tolist()]

    def rebuilt(self, sums: Sequence[float], tops: Sequence[float]) -> Self:
        bins = torch.tensor(sums[2:], dtype=torch.float64).long()
        return type(self)(total=sums[0], count=sums[1], maximum=tops[0], bins=bins)


Metric = Mean | Sum | Max | Min | EffectiveSampleSize | Distribution
Metrics = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches, name by name. Raises TypeError if a name stands for two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name} is a {type(merged[name]).__name__} in one part and a {type(metric).__name__} in another")
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def on_host(metrics: Metrics) -> dict[str, Metric]:
    """The same metrics with their numbers on the host: those on an accelerator come in one copy."""
    parts = [(name, f.name, getattr(metric, f.name)) for name, metric in metrics.items() for f in fields(metric)]
    tensors = [(name, field, value.detach()) for name, field, value in parts if isinstance(value, torch.Tensor)]
    if not tensors:
        return dict(metrics)
    # Every float32 and every count below 2^53 is a float64.
    numbers = torch.cat([tensor.reshape(-1).double() for _, _, tensor in tensors]).cpu()
    found: dict[str, dict[str, Scalar]] = {name: {} for name in metrics}
    for (name, field, tensor), part in zip(tensors, numbers.split([tensor.numel() for _, _, tensor in tensors]), strict=True):
        found[name][field] = part.to(tensor.dtype) if tensor.dim() else float(part)
    return {name: replace(metric, **found[name]) for name, metric in metrics.items()}  # type: ignore[arg-type]


def values(metrics: Metrics) -> dict[str, float]:
    """The plain numbers, for a logger; of a distribution several."""
    numbers: dict[str, float] = {}
    for name, metric in metrics.items():
        numbers[name] = metric.value()
        if isinstance(metric, Distribution):
            numbers[f"{name}_max"] = _number(metric.maximum)
            numbers |= {f"{name}_{suffix}": metric.quantile(q) for suffix, q in QUANTILES.items()}
    return numbers


def without_values(metrics: Metrics) -> dict[str, Metric]:
    """The same names with nothing in them: merged with others they change nothing; alone they are NaN, 0 and infinite."""
    return {
        name: metric.rebuilt([0.0] * len(metric.sums), [float("-inf")] * len(metric.tops))  # what adds nothing, and exceeds nothing
        for name, metric in metrics.items()
    }


def _larger(ours: Scalar, theirs: Scalar) -> Scalar:
    """The larger number, on its device. NaN stays: later numbers must not hide it."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.maximum(ours.detach(), theirs.detach())
    first, second = _number(ours), _number(theirs)
    return second if second > first or second != second else first


def _middle(number: int) -> float:
    """The number that stands for all in a bin."""
    if number in (0, NUM_BINS - 1):
        return float("inf") if number else 0.0
    edges = torch.tensor([number, number + 1], dtype=torch.int32).add_(_FIRST - 1).bitwise_left_shift_(_SHIFT).view(torch.float32)
    return float(edges.double().mean())
