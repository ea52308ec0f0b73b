"""Runs and their effect on the model as one self-contained HTML file: figures, curves, findings, and responses to the same prompts.

templates/report.html is the page, static/ has what draws its charts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from aligner.data.vision import ImageStore, thumbnail
from aligner.errors import DataError
from aligner.files import is_plain_name
from aligner.reporting.charts import MORE, Panel, panels, timeline
from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.evaluations import COLUMNS, read_evaluations
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.pages import render_page
from aligner.reporting.rollout_table import cell
from aligner.reporting.run_view import RunView, Samples
from aligner.reporting.summary import cells, heading
from aligner.settings.schema import flat
from aligner.types import SampleRow

THUMBNAIL_PIXELS = 160  # of the longer side of a sample's image
_NAME_CHARS, _VALUE_CHARS = 80, 200  # of a run's name and of a setting
_FINDING = ("finding", "steps", "evidence", "likely cause", "remedy")


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What the page shows of one run."""

    name: str
    records: Sequence[StepMetrics] = ()
    before: Samples | None = None
    after: Samples | None = None
    images: ImageStore | None = None
    evaluations: Sequence[Mapping[str, Any]] = ()  # of `read_evaluations`
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunView, name: str) -> Reported:
        before, after = run.before_and_after()
        return cls(
            name=name,
            records=run.metrics(),
            before=before,
            after=after,
            images=ImageStore(run.files.images),
            evaluations=read_evaluations(run.files.evaluations),
            config=run.config(),
        )


def write_report(runs: Sequence[RunView], output: Path, columns: Sequence[Column]) -> None:
    """Write the report of these runs. Raises DataError if something of one is damaged, OSError if the file cannot be written."""
    names = [run.files.path.name for run in runs]
    shown = [name if names.count(name) == 1 else str(run.files.path) for name, run in zip(names, runs, strict=True)]
    page = render([Reported.read(run, cell(name, _NAME_CHARS)) for run, name in zip(runs, shown, strict=True)], columns)
    output.write_text(page, encoding="utf-8")


def text_of(before: Samples | None, after: Samples | None, max_chars: int = 240) -> str:
    """The samples side by side as text; empty without samples."""
    if before is None or after is None:
        return ""
    lines = [f"greedy responses to validation prompts, before (step {before.step}) and after (step {after.step})"]
    for prompt, _, rows in _asked([before, after]):
        lines += [f"  {cell(prompt, max_chars)}"]
        lines += [f"    {row.reward:+.2f}  {cell(row.response, max_chars)}" if row else "    -" for row in rows]
    return "\n".join(lines)


def render(runs: Sequence[Reported], columns: Sequence[Column]) -> str:
    """The page."""
    several = len(runs) > 1
    diagnoses = [diagnose(run.records, RULES) for run in runs]
    charts = _charts(runs, () if several else diagnoses[0].findings)
    groups = {name: list(own) for name, own in groupby(enumerate(charts), key=lambda one: one[1].group)}
    titles, samples = _samples(runs)
    stores = [run.images for run in runs if run.images is not None]
    library, program = (_script(name) for name in ("echarts.common.min.js", "report.js"))
    return render_page(
        "report.html",
        title=", ".join(run.name for run in runs),
        runs=[_head(run, found, several=several) for run, found in zip(runs, diagnoses, strict=True)],
        figures=_figures(runs, columns),
        differences=_differences(runs) if several else [],
        groups=groups,
        more=MORE,
        measured=COLUMNS,
        columns=titles,
        asked=[(prompt, [(digest, image_of(stores, digest)) for digest in seen], rows) for prompt, seen, rows in _asked(samples)],
        thumbnail_pixels=THUMBNAIL_PIXELS,
        options=[panel.option for panel in charts],
        allowed=Markup(" ").join(_digest(script) for script in (library, program)),
        library=library,
        program=program,
    )


def fragment(run: RunView, columns: Sequence[Column]) -> str:
    """What a notebook shows of a run: the table of `columns`, each with its course."""
    records = run.metrics()
    return render_page("fragment.html", name=str(run.files.path), heading=heading(records), cells=cells(records, columns))


def _head(run: Reported, diagnosis: Diagnosis, *, several: bool) -> dict[str, Any]:
    found = [(one.rule.title, diagnosis.when(one), one.evidence, one.rule.cause, one.rule.remedy) for one in diagnosis.findings]
    shown = {"name": run.name, "of": f" of {run.name}" if several else "", "evaluations": run.evaluations}
    return shown | {"heading": heading(run.records) if run.records else "no steps yet", "diagnosis": diagnosis, "found": [_FINDING, *found]}


def _charts(runs: Sequence[Reported], marks: Sequence[Any]) -> list[Panel]:
    """The curves of all runs together, each run's phases behind them; what has no group of its own comes last."""
    curves = panels({run.name: run.records for run in runs}, marks=marks)
    phases = [(run, timeline(run.records)) for run in runs]
    named = [Panel(title=f"{panel.title}: {run.name}", group=panel.group, option=panel.option) for run, panel in phases]
    shown = [panel for panel in named if panel.option["series"]]
    return sorted([*curves, *shown], key=lambda panel: panel.group == MORE)


def _figures(runs: Sequence[Reported], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """One run: its table of first, last and best values. Several: the last value of each, and the best where one is better."""
    if len(runs) == 1:
        return cells(runs[0].records, columns)
    rows = [("metric, last value (best)", *(run.name for run in runs))]
    for column in columns:
        courses = [[record.values[column.metric] for record in run.records if column.metric in record.values] for run in runs]
        if any(courses):
            rows.append((column.label, *(_last_and_best(column, values) for values in courses)))
    return rows


def _last_and_best(column: Column, values: Sequence[float]) -> str:
    if not values:
        return ""
    best = column.best(values)
    return column.text(values[-1]) + (f" ({column.text(best)})" if best is not None else "")


def _differences(runs: Sequence[Reported]) -> list[tuple[str, ...]]:
    """The settings that are not the same in all runs, in the order of the first; without the directories, which never are."""
    settings = [dict(flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key != "run.directory")
    rows = [(key, *(cell(str(own[key]), _VALUE_CHARS) if key in own else "" for own in settings)) for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return [("setting", *(run.name for run in runs)), *different] if different else []


def _samples(runs: Sequence[Reported]) -> tuple[list[str], list[Samples]]:
    """The columns of responses: one run before and after; of several the first one before, and all after."""
    if len(runs) == 1:
        titled = [
            (f"before (step {one.step})" if one is runs[0].before else f"after (step {one.step})", one) for one in _validated(runs[0])
        ]
    else:
        titled = [(f"{run.name} after (step {run.after.step})", run.after) for run in runs if run.after]
        first = next((run for run in runs if run.before), None)
        titled[:0] = [(f"{first.name} before (step {first.before.step})", first.before)] if first and first.before else []
    return [title for title, _ in titled], [samples for _, samples in titled]


def _validated(run: Reported) -> list[Samples]:
    return [run.before, run.after] if run.before and run.after else []


def _asked(samples: Sequence[Samples]) -> Iterable[tuple[str, tuple[str, ...], list[SampleRow | None]]]:
    """All prompts, their images, and the response in each of the samples, in the order of the last ones."""
    tables = [{(row.prompt, row.images): row for row in one.rows} for one in samples]
    asked = dict.fromkeys(key for table in reversed(tables) for key in table)
    return [(*key, [table.get(key) for table in tables]) for key in asked]


def image_of(stores: Sequence[ImageStore], digest: str) -> str:
    """A small copy of an image, as the model saw it, as a data URI; empty if its file is missing, or no image any more."""
    for store in stores if is_plain_name(digest) else ():
        try:
            return thumbnail(store.get(digest), THUMBNAIL_PIXELS)
        except DataError:
            continue
    return ""


def _script(name: str) -> Markup:
    """A file of static/, as it is."""
    return Markup((files("aligner.reporting") / "static" / name).read_text(encoding="utf-8"))


def _digest(script: str) -> Markup:
    """The script, as the page's policy names what may run."""
    return Markup(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'")
