"""Metrics that carry their own reduction, so that no mean of means can happen.

A loss reports `Mean(total, count)`, never an average; `merge` adds totals and counts over micro-batches, and
`aligner.parallel.collectives.reduce_metrics` over data-parallel ranks. Names are `area/quantity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

Scalar = float | int | torch.Tensor


def _number(x: Scalar) -> float:
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """`total / count` over everything merged into it."""

    total: Scalar
    count: Scalar

    def merge(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    def value(self) -> float:
        """The mean; NaN where nothing was counted."""
        count = _number(self.count)
        return _number(self.total) / count if count else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """The sum over everything merged into it."""

    total: Scalar

    def merge(self, other: Sum) -> Sum:
        return Sum(total=self.total + other.total)

    def value(self) -> float:
        return _number(self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Max:
    """The maximum over everything merged into it."""

    maximum: Scalar

    def merge(self, other: Max) -> Max:
        ours, theirs = _number(self.maximum), _number(other.maximum)
        return Max(maximum=theirs if theirs > ours or theirs != theirs else ours)  # NaN stays: it must not be hidden by what comes after

    def value(self) -> float:
        return _number(self.maximum)


Metric = Mean | Sum | Max
Metrics = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches, name by name. Raises TypeError where a name stands for two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name} is a {type(merged[name]).__name__} in one part and a {type(metric).__name__} in another")
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """The plain numbers, for a logger."""
    return {name: metric.value() for name, metric in metrics.items()}


def without_values(metrics: Metrics) -> dict[str, Metric]:
    """The same names with nothing in them: merged with others they change nothing; alone they are NaN, 0 and minus infinity."""
    empty: dict[type[Metric], Metric] = {Mean: Mean(total=0.0, count=0), Sum: Sum(total=0.0), Max: Max(maximum=float("-inf"))}
    return {name: empty[type(metric)] for name, metric in metrics.items()}
