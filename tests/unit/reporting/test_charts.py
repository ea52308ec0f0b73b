"""Options of charts: every metric, the right values, and nothing that a page could not take as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from aligner.reporting.charts import MAX_ROWS, MAX_SPANS, MORE, Panel, bars, panels, timeline, trace
from aligner.reporting.diagnosis import Finding
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.jsonl import StepMetrics
from aligner.telemetry.spans import Span

NAN, INF = math.nan, math.inf


def run(*, start: int = 1, seconds: float = 10.0, **courses: Sequence[float | None]) -> list[StepMetrics]:
    """Steps with these values; None: the step does not have the metric. `a__b` is a/b."""
    length = max(map(len, courses.values()))
    metrics = [
        {name.replace("__", "/"): values[k] for name, values in courses.items() if k < len(values) and values[k] is not None}
        for k in range(length)
    ]
    return [StepMetrics(step=start + k, time=1000.0 + seconds * k, values=own) for k, own in enumerate(metrics)]


def points(series: dict) -> list[list]:
    return [point["value"] if isinstance(point, dict) else point for point in series["data"]]


def one(found: list[Panel]) -> Panel:
    assert len(found) == 1
    json.dumps(found[0].option, allow_nan=False)
    return found[0]


def test_every_metric_is_in_one_panel_and_the_unknown_ones_come_last():
    names = ["zoo/lions", "memory/peak_gib", "rollout/reward", "optim/lr", "sft/loss", "reward/loss", "reward/judge", "policy/entropy"]
    records = [StepMetrics(step=k, time=float(k), values={name: k + 0.5 for name in names}) for k in range(3)]
    found = panels({"a": records})
    assert sorted(series["name"] for panel in found for series in panel.option["series"]) == sorted(names)
    assert [panel.group for panel in found] == ["reward", "reward", "loss", "entropy", "optimizer", "memory", MORE]
    assert [panel.title for panel in found][1] == "part of the reward: judge"
    assert found[-1].title == "zoo/lions"
    assert [series["name"] for series in found[2].option["series"]] == ["sft/loss", "reward/loss"]


def test_values_that_are_not_finite_are_gaps_and_a_value_alone_is_a_dot():
    values = [float(k) for k in range(100)]
    values[50], values[52] = NAN, INF
    series = one(panels({"a": run(rollout__reward=values)})).option["series"][0]
    shown = points(series)
    assert shown[49] == [50, 49.0] and shown[50] == [51, None] and shown[52] == [53, None]
    assert series["data"][51] == {"value": [52, 51.0], "symbol": "circle", "symbolSize": 5}
    assert series["symbol"] == "none"
    few = one(panels({"a": run(validation__reward=[0.5, None, None, 0.7])})).option["series"][0]
    assert points(few) == [[1, 0.5], [4, 0.7]] and few["symbol"] == "circle"


def test_digits_tell_values_apart_and_noise_is_left_out():
    close = points(one(panels({"a": run(rollout__reward=[3.00001, 3.00002, 3.000031234567])})).option["series"][0])
    assert close == [[1, 3.00001], [2, 3.00002], [3, 3.00003123]]
    wide = points(one(panels({"a": run(rollout__reward=[1 / 3, 1000.123456789])})).option["series"][0])
    assert wide == [[1, 0.333333], [2, 1000.12]]
    noise = points(one(panels({"a": run(rollout__reward=[1.0, 1.0 - 1e-14])})).option["series"][0])
    assert noise == [[1, 1.0], [2, 1.0]]


def test_tiny_values_are_in_units_that_the_title_names():
    found = one(panels({"a": run(optim__lr=[2e-5, 1e-5, 0.0])}))
    assert found.title == "learning rate, in units of 1e-6"
    assert points(found.option["series"][0]) == [[1, 20.0], [2, 10.0], [3, 0.0]]
    assert one(panels({"a": run(optim__lr=[2e-4])})).title == "learning rate"


@pytest.mark.parametrize("most", (12, 100, 480))
def test_a_long_line_keeps_its_ends_its_extremes_and_its_gaps(most):
    values = [math.sin(k / 50) for k in range(10_000)]
    values[1234], values[5678], values[7000] = 9.0, -9.0, NAN
    shown = points(one(panels({"a": run(rollout__reward=values)}, max_points=most)).option["series"][0])
    assert len(shown) <= most
    assert shown[0] == [1, 0.0] and shown[-1][0] == 10_000
    assert [1235, 9.0] in shown and [5679, -9.0] in shown and [7001, None] in shown
    assert [x for x, _ in shown] == sorted({x for x, _ in shown})


def test_all_panels_of_ten_thousand_steps_are_small():
    names = [f"rollout/m{k}" for k in range(60)]
    records = [StepMetrics(step=k, time=float(k), values=dict.fromkeys(names, k % 97 / 7)) for k in range(10_000)]
    found = panels({"a": records}, smoothing=0.9)
    assert len(json.dumps([panel.option for panel in found])) < 2**21


def test_smoothing_is_in_front_of_the_raw_line():
    """Weights 0.5: 4; (0.5*4 + 1*0)/1.5 ... = 4/3; after a gap the mean goes on."""
    raw, smooth = one(panels({"a": run(rollout__reward=[4.0, 0.0, NAN, 8.0])}, smoothing=0.5)).option["series"]
    assert raw["name"] == smooth["name"] and raw["lineStyle"]["opacity"] < 0.5 and not raw["tooltip"]["show"]
    assert points(raw) == [[1, 4.0], [2, 0.0], [3, None], [4, 8.0]]
    assert points(smooth) == [[1, 4.0], [2, 1.33333], [3, None], [4, pytest.approx((0.5 * 1.0 + 0.5 * 8.0) / 0.875, rel=1e-5)]]
    with pytest.raises(ValueError, match="smoothing=1"):
        panels({}, smoothing=1)


def test_a_logarithmic_axis_is_for_positive_values():
    found = panels({"a": run(rollout__reward=[0.0, 1.0], policy__kl=[0.1, NAN, 10.0])}, log=True)
    assert [panel.option["yAxis"]["type"] for panel in found] == ["value", "log"]
    assert one(panels({"a": run(policy__kl=[0.1, 10.0])})).option["yAxis"]["type"] == "value"


def test_several_runs_have_a_colour_each_and_are_set_against_their_own_start():
    first, second = run(rollout__reward=[1.0, 2.0]), run(start=5, rollout__reward=[3.0, 4.0], seconds=3600.0 * 3)
    lines = one(panels({"a": first, "b": second})).option["series"]
    assert [(line["name"], points(line)) for line in lines] == [("a", [[1, 1.0], [2, 2.0]]), ("b", [[5, 3.0], [6, 4.0]])]
    assert lines[0]["itemStyle"]["color"] != lines[1]["itemStyle"]["color"]
    timed = one(panels({"a": first, "b": second}, against="time")).option
    assert timed["xAxis"]["name"] == "hours"
    assert points(timed["series"][1]) == [[0, 3.0], [3, 4.0]]
    both = one(panels({"a": run(policy__kl=[1.0], policy__ref_kl=[2.0]), "b": run(policy__kl=[1.0])})).option["series"]
    assert [line["name"] for line in both] == ["a: policy/kl", "a: policy/ref_kl", "b: policy/kl"]
    assert [line["lineStyle"]["type"] for line in both] == ["solid", "dashed", "solid"]


def test_findings_are_marked_where_their_metrics_are():
    mark = Finding(rule=RULES[0], steps=[2, 3], evidence="rollout/reward went from 2 (steps 1-2) to 1 (steps 2-3)")
    records = run(rollout__reward=[1.0, 2.0, 3.0], rollout__reward_std=[1.0, 1.0, 1.0])
    with_it, without = panels({"a": records}, marks=[mark])
    assert with_it.option["series"][0]["markLine"]["data"] == [{"name": RULES[0].title, "xAxis": 2}]
    assert with_it.option["series"][0]["markArea"]["data"] == [[{"xAxis": 2}, {"xAxis": 3}]]
    assert "markLine" not in without.option["series"][0]
    elsewhere = replace(mark, evidence="100% of the responses were cut")
    with_it, without = panels({"a": records}, marks=[elsewhere])  # it names no metric: in the first panel
    assert "markLine" in with_it.option["series"][0] and "markLine" not in without.option["series"][0]
    timed = panels({"a": records}, marks=[mark], against="time")[0]
    assert timed.option["series"][0]["markLine"]["data"][0]["xAxis"] == 10.0


def test_the_phases_of_a_step_are_stacked_and_the_rest_is_other():
    found = timeline(run(time__step=[4.0, 8.0, 8.0], time__train=[1.0, 2.0, 2.0], time__generate_seconds=[None, 4.0, 4.0]))
    bars = {bar["name"]: bar["data"] for bar in found.option["series"]}
    assert bars == {"train (25%)": [1.0, 2.0, 2.0], "generate (40%)": [0.0, 4.0, 4.0], "other (35%)": [3.0, 2.0, 2.0]}
    assert found.option["xAxis"]["data"] == ["1", "2", "3"]
    long = timeline(run(time__step=[1.0] * 600, time__train=[0.5] * 600))
    assert len(long.option["series"][0]["data"]) == 60
    assert timeline([]).option["series"] == []


def test_bars_are_side_by_side_or_one_on_the_other() -> None:
    values = {"planned": [1.0, None], "measured": [2.0, 3.0]}
    beside, stacked = (bars("title", ["train", "refit"], values, "seconds", stack) for stack in ("", "all"))
    assert [one["data"] for one in beside.option["series"]] == [[1.0, None], [2.0, 3.0]]
    assert len({one["stack"] for one in beside.option["series"]}) == 2 and len({one["stack"] for one in stacked.option["series"]}) == 1
    assert beside.option["yAxis"]["data"] == ["train", "refit"] and beside.height > stacked.height


def test_spans_are_a_row_for_each_lane():
    spans = [
        Span("train", "actor", "rank 0", 100.5, 1.0),
        Span("step", "actor", "rank 0", 100.0, 2.0, {"step": 3}),
        Span("train", "critic", "rank 0", 101.0, 0.5),
    ]
    option = trace(spans, "title").option
    assert option["yAxis"]["data"] == ["actor rank 0", "critic rank 0"]
    assert [line["name"] for line in option["series"]] == ["step", "train"]  # the short ones over the long ones
    drawn = [point for point in option["series"][0]["data"] if isinstance(point, list)]  # others are only found by a pointer
    assert drawn == [[0.0, "actor rank 0", 2.0, "step 3"], [2.0, "actor rank 0", 2.0, "step 3"], [None] * 4]
    assert [line["encode"]["tooltip"] for line in option["series"]] == [[2, 3], [2]] and len(option["series"][0]["data"]) == 52
    json.dumps(option, allow_nan=False)


def test_a_trace_stays_small() -> None:
    spans = [Span("response", "actor", f"replica {number % 60}", number * 0.01, 0.011 + number * 1e-6) for number in range(7000)]
    found = trace(spans, "title")
    assert found.title == "title (5,000 short spans are not drawn)" and len(found.option["series"][0]["data"]) <= 3 * MAX_SPANS
    assert len(found.option["yAxis"]["data"]) == MAX_ROWS + 1 and found.option["yAxis"]["data"][-1] == "actor: 20 rows more"
    assert trace([], "title").option["series"] == [] and trace(spans[:9], "title").title == "title"
