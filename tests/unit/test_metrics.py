"""Metrics carry their reduction."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.metrics import Max, Mean, Sum, merge, values


def test_a_mean_is_never_a_mean_of_means():
    """(1 + 2 + 3)/3 and 10/1: together 16/4 = 4; the mean of the means would be 6."""
    assert Mean(total=6.0, count=3).merge(Mean(total=10.0, count=1)).value() == 4.0


def test_a_mean_of_nothing_is_nan():
    assert math.isnan(Mean(total=0.0, count=0).value())
    assert Mean(total=0.0, count=0).merge(Mean(total=5.0, count=2)).value() == 2.5


def test_sum_and_max():
    assert Sum(total=2).merge(Sum(total=3.5)).value() == 5.5
    assert Max(maximum=-4.0).merge(Max(maximum=-3.0)).value() == -3.0
    assert Max(maximum=1.0).merge(Max(maximum=-3.0)).value() == 1.0


def test_a_maximum_that_is_not_a_number_stays_visible():
    nan = Max(maximum=float("nan"))
    assert math.isnan(nan.merge(Max(maximum=1.0)).value())
    assert math.isnan(Max(maximum=1.0).merge(nan).value())


def test_tensors_are_taken_without_their_gradient():
    total = torch.tensor(3.0, requires_grad=True)
    metric = Mean(total=total * 2, count=torch.tensor(4))
    assert metric.value() == 1.5
    assert Max(maximum=total * 1).merge(Max(maximum=2.0)).value() == 3.0


def test_merge_by_name():
    merged = merge([{"a/x": Mean(total=1.0, count=1), "a/y": Sum(total=1)}, {"a/x": Mean(total=2.0, count=3)}, {"a/z": Max(maximum=0.0)}])
    assert values(merged) == {"a/x": 0.75, "a/y": 1.0, "a/z": 0.0}
    assert merge([]) == {}


def test_one_name_cannot_be_two_kinds():
    with pytest.raises(TypeError, match="a/x"):
        merge([{"a/x": Mean(total=1.0, count=1)}, {"a/x": Sum(total=1)}])
