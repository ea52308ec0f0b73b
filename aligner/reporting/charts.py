"""Metrics as interactive charts: options of Apache ECharts, plain data without callbacks, for the report and for pages that show runs.

A line that is longer than `max_points` keeps the extremes of each stretch; a value that is not finite is a gap in its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

import numpy as np

from aligner.reporting.diagnosis import Finding
from aligner.reporting.formats import stretches
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.progress import phases, step_seconds
from aligner.telemetry.spans import Span, last_steps, rows

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito's: distinct for the colour-blind
GREY, FAINT = "#7a818e", "#7a818e40"  # of texts and lines, on light and on dark ground
MAX_POINTS = 480  # of a line
MAX_BARS = 60  # of the steps in a timeline; more are means of equal stretches
TRACED_STEPS = 3  # of a run, whose spans are shown
MAX_SPANS, MAX_ROWS = 2000, 40  # spans that are shown, the longest ones; rows of a component
POINTED = 50  # places of a timeline at which a span tells its figures
_DASHES = ("solid", "dashed", "dotted")
_FEW = 40  # points that are drawn as dots too
MORE, TIMES = "more", "timeline"  # groups

# Group, title and the metrics of a panel (a regular expression). A metric is in the first that fits; a title with {} is a panel for each.
_PANELS = (
    ("reward", "reward of the rollouts", r"rollout/reward|reward/mean"),
    ("reward", "reward on validation prompts", r"validation/reward.*"),
    ("reward", "accuracy", r".+/(accuracy|agreement|first_error_accuracy)|validation/(pass|mean)@\d+"),
    ("loss", "loss", r"(sft|preference|reward|kto|distillation)/loss|validation/loss"),
    ("loss", "loss of the policy", r"policy/loss"),
    ("loss", "loss of the critic", r"critic/loss"),
    ("loss", "supervised part of the loss, nats per token", r".+/(sft_loss|nll|pretraining_loss)"),
    ("reward", "margin of chosen over rejected", r".+/margin"),
    ("reward", "implicit rewards of chosen and rejected", r"(preference|kto|validation)/(chosen|rejected|desirable|undesirable)_reward"),
    ("reward", "scores of the reward model", r"reward/(chosen|rejected|label|score)_mean"),
    ("reward", "error of the reward model", r"(reward|validation)/(absolute_error|mse.*)"),
    ("reward", "correlation with the labels", r"validation/correlation_.*"),
    ("reward", "mean reward by how the response ended", r"rollout/reward_(ended|truncated|empty)"),
    ("reward", "spread of the rewards", r"rollout/reward_std|reward_std/environment"),
    ("reward", "part of the reward: {}", r"reward/(.+)"),
    ("reward", "spread of a part of the reward: {}", r"reward_std/(.+)"),
    ("KL", "KL to the start or reference, nats per token", r"(policy|pairs|kto|steerlm|validation|distillation)/(ref_|reverse_)?kl"),
    ("KL", "KL of an update, nats per token", r"policy/approx_kl"),
    ("KL", "coefficient of the KL penalty", r"policy/kl_coef"),
    ("KL", "share of clipped tokens", r".+/clip_fraction"),
    ("KL", "mean probability ratio of an update", r"policy/ratio_mean"),
    ("entropy", "entropy, nats per token", r".+/entropy"),
    ("lengths", "length, tokens", r"(rollout|validation|kept|data|constitution)/.*length(_max)?"),
    (
        "lengths",
        "share of truncated, empty, repeated",
        r".+/(truncated_fraction|truncated@\d+|empty_fraction|repeated_ngrams|same_response)",
    ),
    ("log-probs", "gap of the log-probs of sampler and trainer, nats", r"rollout/logprob_gap.*"),
    ("log-probs", "KL of sampler and trainer, nats per token", r"rollout/logprob_kl.*"),
    ("log-probs", "importance weights", r"rollout/importance_weight.*"),
    ("log-probs", "effective sample size, share", r"rollout/effective_sample_size"),
    ("log-probs", "log-probs of chosen and rejected, nats", r".+/(chosen|rejected)_logprob"),
    ("optimizer", "norm of the gradient", r".+/(optim_)?grad_norm"),
    ("optimizer", "learning rate", r".+/(optim_)?lr"),
    ("optimizer", "updates of a step", r".+/(optim_)?(updates|skipped|overflows|spoilt|skipped_in_a_row|step_left_out)"),
    ("critic", "explained variance", r"critic/explained_variance"),
    ("critic", "mean value and return", r"critic/(return_)?mean"),
    ("critic", "errors and squares", r"critic/.*_(sq_)?mean"),
    ("throughput", "speed, tokens per second", r".+/tokens_per_second"),
    ("throughput", "seconds of a step and its phases", r"time/.*"),
    ("throughput", "imbalance of the replicas (1: none)", r"rollout/.*_imbalance"),
    ("throughput", "age of the rollouts, versions of the weights", r"rollout/(staleness.*|versions)"),
    ("memory", "memory: {}", r"(.*memory.*|.+_(gib|bytes))"),
    ("learnt", "tokens learnt from, of a step", r"learnt/tokens.*"),
    ("learnt", "samples learnt from, of a step", r"learnt/samples.*"),
    ("learnt", "samples left out, of a step", r"left_out/.*"),
    ("data", "epochs", r"data/epoch.*"),
    ("data", "shares of the sets", r"data/share/.*"),
    (MORE, "findings of the diagnosis (1: holds)", r"diagnosis/.*"),
)
GROUPS = tuple(dict.fromkeys(group for group, _, _ in _PANELS))  # in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart: `option` is for `setOption` of ECharts."""

    title: str
    group: str
    option: dict[str, Any]
    height: int = 280  # pixels that it needs


@dataclass(frozen=True, slots=True)
class _Line:
    """One metric of one run: its values, and the records (by number) that have them."""

    run: str
    metric: str
    places: Sequence[int]
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]


def panels(
    runs: Mapping[str, Sequence[StepMetrics]],
    *,
    against: Literal["step", "time"] = "step",
    smoothing: float = 0.0,
    log: bool = False,
    marks: Sequence[Finding] = (),
    max_points: int = MAX_POINTS,
) -> list[Panel]:
    """All metrics of these runs, a line for each run and metric, in the order in which people look at them.

    Args:
        against: the horizontal axis: steps, or the time since each run's first step.
        smoothing: weight of the past in an exponential mean, from 0 (none) to below 1; the raw line is faint behind it.
        log: logarithmic vertical axes where all values are positive.
        marks: findings, each shown in the panels whose metrics its evidence names, else in the first, at the steps of the first run.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing}: must be at least 0 and below 1")
    xs, unit = _horizontal(runs, against)
    chosen: dict[tuple[int, int, str], list[_Line]] = {}
    for run, records in runs.items():
        for line in _lines(run, records):
            chosen.setdefault(_place(line.metric), []).append(line)
    steps = {record.step: x for run, records in list(runs.items())[:1] for record, x in zip(records, xs[run], strict=True)}
    unnamed = [one for one in marks if not any(_names(one, lines) for lines in chosen.values())]
    found: list[Panel] = []
    for (group, _, title), lines in sorted(chosen.items(), key=lambda one: one[0]):
        lines, title = _scaled(lines, title)
        series = _series(lines, xs, smoothing, max_points, several=len(runs) > 1)
        is_log = log and all((line.finite > 0).all() for line in lines)
        option = _option(series, unit, "log" if is_log else "value")
        series[0] |= _marked([one for one in marks if (one in unnamed and not found) or _names(one, lines)], steps)
        found.append(Panel(title=title, group=GROUPS[group], option=option))
    return found


def group_of(metric: str) -> str:
    """The group of a metric's panel."""
    return GROUPS[_place(metric)[0]]


def times(records: Sequence[StepMetrics], spans: Sequence[Span]) -> list[Panel]:
    """Where the time goes: the phases of each step, and what each component's lanes did in the last steps, as far as a run has them."""
    traced = trace(last_steps(spans, TRACED_STEPS), f"what ran when in the last {TRACED_STEPS} steps, seconds")
    return [panel for panel in (timeline(records), traced) if panel.option["series"]]


def trace(spans: Sequence[Span], title: str) -> Panel:
    """What each lane of each component did when, from the first span on."""
    option = _gantt(spans)
    title += f" ({len(spans) - MAX_SPANS:,} short spans are not drawn)" if len(spans) > MAX_SPANS else ""
    return Panel(title=title, group=TIMES, option=option, height=120 + 20 * len(option["yAxis"]["data"]))


def timeline(records: Sequence[StepMetrics]) -> Panel:
    """The phases of each step as a stacked bar."""
    timed = [(record.step, phases(record.values), seconds) for record in records if (seconds := step_seconds(record.values))]
    parts = stretches(timed, MAX_BARS)
    names = dict.fromkeys(name for _, own, _ in timed for name in own)
    times = {name: [fmean(own.get(name, 0.0) for _, own, _ in part) for part in parts] for name in names}
    whole = [fmean(seconds for _, _, seconds in part) for part in parts]
    times["other"] = [max(0.0, seconds - sum(own[k] for own in times.values())) for k, seconds in enumerate(whole)]
    total = sum(map(sum, times.values())) or 1.0
    bars = [
        {"name": f"{name} ({sum(own) / total:.0%})", "data": _rounded(own), "type": "bar", "stack": "step", "barCategoryGap": "10%"}
        for name, own in times.items()
        if sum(own)
    ]
    option = _option(bars, "step", "value")
    option["xAxis"] |= {"type": "category", "data": [str(part[0][0]) for part in parts], "boundaryGap": True}
    option["legend"] |= {"show": True}
    return Panel(title="phases of a step, seconds", group=TIMES, option=option)


def bars(title: str, names: Sequence[str], values: Mapping[str, Sequence[float | None]], unit: str, stack: str = "") -> Panel:
    """A row for each name, with a bar for each of the `values`, or with one that all of them make together (`stack`)."""
    series = [{"name": name, "type": "bar", "stack": stack or name, "data": list(own), "barMaxWidth": 22} for name, own in values.items()]
    option = _option(series, unit, "value")
    option["grid"] |= {"left": 8, "containLabel": True}
    option["tooltip"] |= {"axisPointer": {"type": "shadow"}}
    option["toolbox"] |= {"show": False}
    option["xAxis"] |= {"min": 0, "max": None}
    option["yAxis"] |= {"type": "category", "data": list(names), "inverse": True}
    return Panel(title=title, group=TIMES, option=option, height=110 + (26 if stack else 44) * len(names))


def _place(metric: str) -> tuple[int, int, str]:
    """Of a metric's panel: its group's number, its own, and its title."""
    for place, (group, title, pattern) in enumerate(_PANELS):
        if found := re.fullmatch(pattern, metric):
            return GROUPS.index(group), place, title.format(*found.groups())
    return GROUPS.index(MORE), len(_PANELS), metric


def _lines(run: str, records: Sequence[StepMetrics]) -> list[_Line]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for place, record in enumerate(records):
        for metric, value in record.values.items():
            if metric not in columns:
                columns[metric] = ([], [])
            places, values = columns[metric]
            places.append(place)
            values.append(value)
    return [_Line(run, metric, places, np.array(values)) for metric, (places, values) in columns.items()]


def _scaled(lines: list[_Line], title: str) -> tuple[list[_Line], str]:
    """Values below 1e-4 in units of 1e-6, 1e-9 and so on, which the title names: an axis of zeros has no room for its chart."""
    most = max(np.abs(line.finite).max(initial=0.0) for line in lines)
    if not 0 < most < 1e-4:
        return lines, title
    power = -3 * math.floor(math.log10(most) / 3)
    return [replace(line, values=line.values * 10.0**power) for line in lines], f"{title}, in units of 1e-{power}"


def _horizontal(runs: Mapping[str, Sequence[StepMetrics]], against: str) -> tuple[dict[str, Sequence[float]], str]:
    """For each run the place of its records on the axis, and the axis's name."""
    if against == "step":
        return {run: [record.step for record in records] for run, records in runs.items()}, "step"
    longest = max((records[-1].time - records[0].time for records in runs.values() if records), default=0.0)
    divisor, unit = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
    return {run: [round((one.time - records[0].time) / divisor, 4) for one in records] for run, records in runs.items()}, unit


def _series(
    lines: Sequence[_Line], xs: Mapping[str, Sequence[float]], smoothing: float, max_points: int, *, several: bool
) -> list[dict[str, Any]]:
    metrics, runs = list(dict.fromkeys(line.metric for line in lines)), list(xs)
    found = []
    for line in lines:
        number, run = metrics.index(line.metric), runs.index(line.run)
        name = line.metric if not several else line.run if len(metrics) == 1 else f"{line.run}: {line.metric}"
        colour = COLOURS[(run if several else number) % len(COLOURS)]
        style = {"width": 1.6, "type": _DASHES[(number if several else number // len(COLOURS)) % len(_DASHES)]}
        own = [xs[line.run][place] for place in line.places]
        shown = {"name": name, "type": "line", "itemStyle": {"color": colour}, "emphasis": {"disabled": True}}
        raw = shown | _points(own, line.values, max_points)
        if smoothing:
            found.append({**raw, "lineStyle": style | {"opacity": 0.25}, "symbol": "none", "tooltip": {"show": False}})
            raw = shown | _points(own, _smoothed(line.values, smoothing), max_points)
        found.append({**raw, "lineStyle": style})
    return found


def _smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential means without the bias to 0 of the first ones; what is not finite stays, and counts for none."""
    total = mass = 0.0
    found = []
    for value in values.tolist():
        if math.isfinite(value):
            total, mass = weight * total + (1 - weight) * value, weight * mass + 1 - weight
            value = total / mass
        found.append(value)
    return np.array(found)


def _points(xs: Sequence[float], values: np.ndarray, max_points: int) -> dict[str, Any]:
    """The points of a line: null is a gap, and a value alone between gaps is a dot."""
    kept = _kept(values, max_points)
    shown = _rounded(values[kept].tolist())
    data: list[Any] = [[xs[place], value] for place, value in zip(kept, shown, strict=True)]
    if len(data) <= _FEW:
        return {"data": data, "symbol": "circle", "symbolSize": 5}
    around = [None, *shown, None]
    for place, value in enumerate(shown):
        if value is not None and around[place] is None and around[place + 2] is None:
            data[place] = {"value": data[place], "symbol": "circle", "symbolSize": 5}
    return {"data": data, "symbol": "none"}


def _kept(values: np.ndarray, most: int) -> list[int]:
    """The places of at most so many values: the first, the last, and of each stretch the lowest, the highest and a gap, if any."""
    count = len(values)
    if count <= most:
        return list(range(count))
    size = math.ceil(count / max(1, (most - 2) // 3))
    table = np.pad(values, (0, -count % size), mode="edge").reshape(-1, size)
    starts, is_finite = np.arange(len(table)) * size, np.isfinite(table)
    lowest = starts + np.where(is_finite, table, np.inf).argmin(1)
    highest = starts + np.where(is_finite, table, -np.inf).argmax(1)
    gaps = (starts + is_finite.argmin(1))[~is_finite.all(1)]
    return np.unique(np.minimum(np.concatenate([[0, count - 1], lowest, highest, gaps]), count - 1)).tolist()


def _rounded(values: Sequence[float]) -> list[float | None]:
    """As many digits as tell the values apart, but six to nine: beyond, there is only noise. Null for what is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    most, span = max(map(abs, finite), default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    digits = min(9, max(6, 4 + math.ceil(math.log10(most / span)))) if span and most else 6
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def _option(series: list[dict[str, Any]], unit: str, scale: str) -> dict[str, Any]:
    axis = {"axisLabel": {"color": GREY, "hideOverlap": True}, "axisLine": {"lineStyle": {"color": GREY}}, "nameTextStyle": {"color": GREY}}
    has_legend = len({one["name"] for one in series}) > 1
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "color": [*COLOURS, "#F0E442", GREY],  # bars may be of more kinds
        "textStyle": {"color": GREY},
        "grid": {"left": 12, "right": 20, "top": 36, "bottom": 62 if has_legend else 34},
        "tooltip": {"trigger": "axis", "confine": True},
        "legend": {"show": has_legend, "type": "scroll", "bottom": 0, "textStyle": {"color": GREY}, "pageTextStyle": {"color": GREY}},
        "toolbox": {"right": 8, "iconStyle": {"borderColor": GREY}, "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}}},
        "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl", "preventDefaultMouseMove": False}],
        "xAxis": {**axis, "type": "value", "name": unit, "nameLocation": "middle", "nameGap": 24, "splitLine": {"show": False}}
        | {"min": "dataMin", "max": "dataMax", "minInterval": 1 if unit == "step" else 0},
        "yAxis": {**axis, "type": scale, "scale": True, "splitLine": {"lineStyle": {"color": FAINT}}},
        "series": series,
    }


def _names(finding: Finding, lines: Sequence[_Line]) -> bool:
    return any(re.search(rf"(?<![\w/]){re.escape(line.metric)}(?![\w/])", finding.evidence) for line in lines)


def _marked(findings: Sequence[Finding], places: Mapping[int, float]) -> dict[str, Any]:
    """A line at the first step of each finding, and an area from there to its last."""
    shown = [one for one in findings if {one.steps[0], one.steps[-1]} <= places.keys()]
    if not shown:
        return {}
    label = {"formatter": "{b}", "position": "insideEndTop", "color": GREY, "width": 150, "overflow": "truncate"}
    lines = [{"name": one.rule.title, "xAxis": places[one.steps[0]]} for one in shown]
    areas = [[{"xAxis": places[one.steps[0]]}, {"xAxis": places[one.steps[-1]]}] for one in shown]
    style = {"color": COLOURS[-1], "type": "dashed"}
    return {
        "markLine": {"symbol": "none", "silent": True, "label": label, "lineStyle": style, "data": lines},
        "markArea": {"silent": True, "itemStyle": {"color": COLOURS[-1], "opacity": 0.08}, "data": areas},
    }


def _gantt(spans: Sequence[Span]) -> dict[str, Any]:
    """A thick line for each span, in a row for each lane; a colour for each name, short spans over those that hold them."""
    longest = sorted(spans, key=lambda span: -span.seconds)[:MAX_SPANS]
    zero = min((span.start for span in longest), default=0.0)
    whole = max((span.end for span in longest), default=0.0) - zero
    lanes: list[str] = []
    by_name: dict[str, list[Any]] = {}
    for component, own in groupby(rows(sorted(longest, key=lambda span: span.component)), key=lambda row: row.component):
        all_rows = list(own)
        for row in all_rows[:MAX_ROWS]:
            lanes.append(f"{component} {row.title}")
            for span in row.spans:
                by_name.setdefault(span.name, []).extend([*_places(span, zero, whole, lanes[-1]), [None] * 4])
        if len(all_rows) > MAX_ROWS:
            lanes.append(f"{component}: {len(all_rows) - MAX_ROWS} rows more")
    told = {span.name for span in longest if span.arguments}
    series = [
        {"name": name, "type": "line", "data": by_name[name], "symbol": "rect", "symbolSize": [2, 12]}
        | {"lineStyle": {"width": 12, "cap": "butt"}, "dimensions": ["start", "lane", "seconds", "of"]}
        | {"encode": {"x": 0, "y": 1, "tooltip": [2, 3] if name in told else [2]}}
        for name in dict.fromkeys(span.name for span in longest)
        if name in by_name
    ]
    option = _option(series, "seconds", "value")
    option["yAxis"] |= {"type": "category", "data": lanes, "inverse": True, "axisLabel": {"color": GREY, "interval": 0}}
    option["xAxis"]["axisLabel"] = option["xAxis"]["axisLabel"] | {"showMaxLabel": False}  # it is not round
    option["tooltip"] |= {"trigger": "item"}
    return option


def _places(span: Span, zero: float, whole: float, lane: str) -> list[Any]:
    """The points of a span's line: its ends and, where a pointer finds a long one, some between."""
    parts = max(1, int(POINTED * span.seconds / whole)) if whole else 1
    told = ", ".join(f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in span.arguments.items())
    points = [[round(span.start - zero + span.seconds * part / parts, 4), lane, round(span.seconds, 4), told] for part in range(parts + 1)]
    return [points[0], *({"value": point, "symbolSize": [16, 12], "itemStyle": {"opacity": 0}} for point in points[1:-1]), points[-1]]
