"""Metrics carry their reduction."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.telemetry.metrics import NUM_BINS, Distribution, EffectiveSampleSize, Max, Mean, Min, Sum, merge, values, without_values


def test_a_mean_is_never_a_mean_of_means():
    """(1 + 2 + 3)/3 and 10/1: together 16/4 = 4; the mean of the means would be 6."""
    assert Mean(total=6.0, count=3).merge(Mean(total=10.0, count=1)).value() == 4.0
    assert math.isnan(Mean(total=0.0, count=0).value())
    assert Mean(total=0.0, count=0).merge(Mean(total=5.0, count=2)).value() == 2.5


def test_sums_and_extremes_of_which_one_that_is_no_number_stays_visible():
    assert Sum(total=2).merge(Sum(total=3.5)).value() == 5.5
    nan, larger = Max(maximum=math.nan), Max(maximum=1.0)
    assert larger.merge(Max(maximum=-3.0)).value() == Max(maximum=-3.0).merge(larger).value() == 1.0
    assert math.isnan(nan.merge(larger).value()) and math.isnan(larger.merge(nan).value())
    assert Min(minimum=-4.0).merge(Min(minimum=-3.0)).value() == -4.0
    assert math.isnan(Min(minimum=math.nan).merge(Min(minimum=1.0)).value())


def test_tensors_are_taken_without_their_gradient():
    total = torch.tensor(3.0, requires_grad=True)
    metric = Mean(total=total * 2, count=torch.tensor(4))
    assert metric.value() == 1.5
    assert Max(maximum=total * 1).merge(Max(maximum=2.0)).value() == 3.0


def test_merge_by_name():
    merged = merge([{"a/x": Mean(total=1.0, count=1), "a/y": Sum(total=1)}, {"a/x": Mean(total=2.0, count=3)}, {"a/z": Max(maximum=0.0)}])
    assert values(merged) == {"a/x": 0.75, "a/y": 1.0, "a/z": 0.0}
    assert merge([]) == {}
    with pytest.raises(TypeError, match="a/x"):  # two kinds
        merge([{"a/x": Mean(total=1.0, count=1)}, {"a/x": Sum(total=1)}])


def distribution(*numbers: float) -> Distribution:
    x = torch.tensor(numbers)
    return Distribution.of(x, torch.ones_like(x, dtype=torch.bool))


def test_quantiles_are_within_the_stated_resolution():
    """1 to 1000 times any scale from the first octave to the last: the exact quantiles are known."""
    for scale in (2.0**-29, 1e-6, 0.01, 0.2):
        found = distribution(*(scale * n for n in range(1, 1001)))
        for q, exact in ((0.5, 500), (0.9, 900), (0.99, 990), (0.999, 999), (1.0, 1000), (0.0, 1)):
            assert found.quantile(q) == pytest.approx(scale * exact, rel=0.016)
        assert values({"a/x": found}) == pytest.approx(
            {"a/x": 500.5 * scale, "a/x_max": 1000 * scale}
            | {f"a/x_{name}": scale * n for name, n in (("p50", 500), ("p90", 900), ("p99", 990), ("p999", 999))},
            rel=0.016,
        )


def test_what_is_outside_the_bins():
    assert distribution(0.0, -0.0, 2.0**-31, 0.0).quantile(1.0) == 0.0
    assert distribution(2.0**-30).quantile(0.5) == pytest.approx(2.0**-30, rel=0.016)
    assert distribution(255.9).quantile(0.5) == pytest.approx(255.9, rel=0.016)
    assert [distribution(x).quantile(0.5) for x in (256.0, math.inf, math.nan)] == [math.inf] * 3
    assert math.isnan(Distribution.of(torch.ones(3), torch.zeros(3, dtype=torch.bool)).quantile(0.5))


def test_distributions_merge_exactly():
    parts = [distribution(0.5, 3.0), distribution(0.1), distribution(7.0, 0.25, 0.25)]
    whole, merged = distribution(0.5, 3.0, 0.1, 7.0, 0.25, 0.25), parts[0].merge(parts[1]).merge(parts[2])
    assert torch.equal(whole.bins, merged.bins) and int(whole.bins.sum()) == 6 and len(whole.bins) == NUM_BINS
    assert values({"a/x": whole}) == values({"a/x": merged})


def test_effective_sample_size():
    """Weights 3, 1 | 0: 16 / 10 / 3."""
    first, second = EffectiveSampleSize(total=4.0, squares=10.0, count=2), EffectiveSampleSize(total=0.0, squares=0.0, count=1)
    assert first.merge(second).value() == pytest.approx(16 / 30)
    assert math.isnan(second.value())


def test_every_kind_survives_a_reduction_and_can_be_emptied():
    """What `reduce_metrics` does over one rank; and emptied metrics change nothing that they are merged with."""
    metrics = {
        "a/mean": Mean(total=3.0, count=2),
        "a/sum": Sum(total=2.0),
        "a/max": Max(maximum=-1.0),
        "a/min": Min(minimum=5.0),
        "a/ess": EffectiveSampleSize(total=4.0, squares=10.0, count=2),
        "a/gap": distribution(0.5, 3.0),
    }
    assert values({name: metric.rebuilt(metric.sums, metric.tops) for name, metric in metrics.items()}) == values(metrics)
    emptied = without_values(metrics)
    assert values(merge([emptied, metrics])) == values(merge([metrics, emptied])) == values(metrics)
    assert math.isnan(values(emptied)["a/mean"]) and values(emptied)["a/max"] == -math.inf == -values(emptied)["a/min"]
