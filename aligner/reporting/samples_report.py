"""A run's effect on its model as one self-contained HTML file: curves, and responses to the same prompts before and after.

templates/report.html is the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from aligner.data.vision import ImageStore, thumbnail
from aligner.errors import DataError
from aligner.files import is_plain_name
from aligner.reporting.diagnosis import diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.evaluations import COLUMNS, read_evaluations
from aligner.reporting.formats import Column, Goal, number, stretches
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.pages import render_page
from aligner.reporting.rollout_table import cell
from aligner.reporting.run_view import RunView, Samples
from aligner.reporting.summary import cells, heading
from aligner.types import SampleRow

MAX_POINTS = 400  # of a curve; longer ones are drawn as means of equal stretches
THUMBNAIL_PIXELS = 160  # of the longer side of a sample's image
# Of a chart, pixels; its curve is between the last four.
_FRAME = {"width": 520, "height": 170, "left": 62, "right": 508, "top": 12, "bottom": 148}

# Title, and the metrics that may hold it, of which the first that the run has is drawn.
_CHARTS = (
    ("reward of the rollouts", ("rollout/reward",), ".3f"),
    ("reward on validation prompts", ("validation/reward",), ".3f"),
    ("accuracy on validation prompts", ("validation/accuracy",), ".3f"),
    ("KL to the start, nats per token", ("policy/ref_kl", "policy/kl", "pairs/ref_kl"), ".4f"),
    ("response length, tokens", ("rollout/response_length",), ".1f"),
    ("mean |log-prob of the sampler - of the trainer|", ("rollout/logprob_gap",), ".1e"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A curve as the page draws it: `lines` are the points of its unbroken stretches (`x,y x,y ...`, pixels)."""

    title: str
    course: str  # from the first value to the last
    lines: list[str]
    low: str
    high: str
    first_step: int
    last_step: int


def write_report(run: RunView, output: Path) -> None:
    """Write the report of a run. Raises DataError if its metrics or samples are damaged, OSError if it cannot be written."""
    evaluations = read_evaluations(run.files.evaluations)
    page = render(run.files.path.name, run.metrics(), *run.before_and_after(), ImageStore(run.files.images), evaluations=evaluations)
    output.write_text(page, encoding="utf-8")


def text_of(before: Samples | None, after: Samples | None, max_chars: int = 240) -> str:
    """The samples side by side as text; empty without samples."""
    if before is None or after is None:
        return ""
    lines = [f"greedy responses to validation prompts, before (step {before.step}) and after (step {after.step})"]
    for prompt, _, old, new in _pairs(before, after):
        lines += [f"  {cell(prompt, max_chars)}"]
        lines += [f"    {row.reward:+.2f}  {cell(row.response, max_chars)}" if row else "    -" for row in (old, new)]
    return "\n".join(lines)


def render(
    name: str,
    records: Sequence[StepMetrics],
    before: Samples | None,
    after: Samples | None,
    images: ImageStore | None = None,
    *,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page. `records` are those of metrics.jsonl; `images` has the samples' images; `evaluations` of `read_evaluations`."""
    pairs = _pairs(before, after) if before and after else []
    return render_page(
        "report.html",
        **_FRAME,
        name=name,
        heading=heading(records) if records else "no steps yet",
        charts=_charts(records),
        diagnosis=diagnose(records, RULES),
        evaluations=evaluations,
        measured=COLUMNS,
        before=before,
        after=after,
        pairs=[(prompt, [(digest, image_of(images, digest)) for digest in seen], old, new) for prompt, seen, old, new in pairs],
        thumbnail_pixels=THUMBNAIL_PIXELS,
    )


def fragment(run: RunView, columns: Sequence[Column]) -> str:
    """What a notebook shows of a run: the table of `columns` and the curve of the first one with a goal that the run has."""
    records = run.metrics()
    courses = [(one, [(record.step, record.values[one.metric]) for record in records if one.metric in record.values]) for one in columns]
    charts = [chart(one.label, points, one.format) for one, points in courses if points and one.goal is not Goal.none]
    shown = {"name": str(run.files.path), "heading": heading(records), "cells": cells(records, columns), "charts": charts[:1]}
    return render_page("fragment.html", **_FRAME, **shown)


def _charts(records: Sequence[StepMetrics]) -> list[Chart]:
    """For each of _CHARTS, the first metric that the run has."""
    found = []
    for title, names, form in _CHARTS:
        courses = ([(record.step, record.values[name]) for record in records if name in record.values] for name in names)
        if points := next(filter(None, courses), None):
            found.append(chart(title, points, form))
    return found


def chart(title: str, points: Sequence[tuple[int, float]], form: str = ".3f") -> Chart:
    """The chart of (step, value) points; the line is broken at values that are not finite."""
    course = f"{number(points[0][1], form)} to {number(points[-1][1], form)}"
    points = [(stretch[0][0], sum(value for _, value in stretch) / len(stretch)) for stretch in stretches(points, MAX_POINTS)]
    finite = [value for _, value in points if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    first, last = points[0][0], points[-1][0]
    left, right, top, bottom = (_FRAME[side] for side in ("left", "right", "top", "bottom"))

    def place(step: float, value: float) -> str:
        x = left + (right - left) * ((step - first) / (last - first) if last > first else 0.5)
        y = bottom - (bottom - top) * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    unbroken = (list(group) for is_finite, group in groupby(points, lambda point: math.isfinite(point[1])) if is_finite)
    # A point alone is a line of no length, which a round end makes visible.
    lines = [" ".join(place(*point) for point in (line * 2 if len(line) == 1 else line)) for line in unbroken]
    return Chart(title=title, course=course, lines=lines, low=number(low, form), high=number(high, form), first_step=first, last_step=last)


def _pairs(before: Samples, after: Samples) -> list[tuple[str, tuple[str, ...], SampleRow | None, SampleRow | None]]:
    """All prompts of both steps, their images, and their responses, in the order of the later one."""
    old, new = ({(row.prompt, row.images): row for row in samples.rows} for samples in (before, after))
    return [(*asked, old.get(asked), new.get(asked)) for asked in new | old]


def image_of(images: ImageStore | None, digest: str) -> str:
    """A small copy of an image, as the model saw it, as a data URI; empty if its file is missing, or no image any more."""
    try:
        return thumbnail(images.get(digest), THUMBNAIL_PIXELS) if images is not None and is_plain_name(digest) else ""
    except DataError:
        return ""
