"""Runs and their effect on the model as one self-contained HTML file: figures, curves, findings, and responses to the same prompts.

templates/report.html is the page, static/ has what draws its charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from aligner.data.vision import ImageStore, thumbnail
from aligner.errors import DataError
from aligner.files import is_plain_name
from aligner.reporting.charts import MORE, Panel, panels, times
from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.evaluations import COLUMNS, read_evaluations
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.pages import drawing, render_page
from aligner.reporting.rollout_table import cell
from aligner.reporting.run_view import RunView, Samples
from aligner.reporting.summary import cells, heading
from aligner.settings.schema import flat
from aligner.types import SampleRow

THUMBNAIL_PIXELS = 160  # of the longer side of a sample's image
_NAME_CHARS, _VALUE_CHARS = 80, 200  # of a run's name and of a setting


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
    times: Sequence[Panel] = ()

    @classmethod
    def read(cls, run: RunView, name: str, planned: Sequence[Panel] = ()) -> Reported:
        """`planned`: what its plan says of its times, as charts."""
        before, after = run.before_and_after()
        records = run.metrics()
        return cls(
            name=name,
            records=records,
            times=[*times(records, run.spans()[0]), *planned],
            before=before,
            after=after,
            images=ImageStore(run.files.images),
            evaluations=read_evaluations(run.files.evaluations),
            config=run.config(),
        )


def write_report(runs: Sequence[RunView], output: Path, columns: Sequence[Column], planned: Callable[[RunView], Sequence[Panel]]) -> None:
    """Write the report of these runs. Raises DataError if something of one is damaged, OSError if the file cannot be written."""
    names = [cell(run.files.path.name, _NAME_CHARS) for run in runs]
    shown = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]
    page = render([Reported.read(run, name, planned(run)) for run, name in zip(runs, shown, strict=True)], columns)
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
    samples = _samples(runs)
    stores = [run.images for run in runs if run.images is not None]
    seen = _asked([own for _, own in samples])
    return render_page(
        "report.html",
        title=", ".join(run.name for run in runs),
        runs=[_head(run, found, several=several) for run, found in zip(runs, diagnoses, strict=True)],
        figures=_figures(runs, columns),
        differences=differences({run.name: run.config for run in runs}),
        groups=groups,
        more=MORE,
        measured=COLUMNS,
        columns=[title for title, _ in samples],
        asked=[(prompt, [(digest, image_of(stores, digest)) for digest in images], rows) for prompt, images, rows in seen],
        thumbnail_pixels=THUMBNAIL_PIXELS,
        **drawing(charts),
    )


def fragment(run: RunView, columns: Sequence[Column]) -> str:
    """What a notebook shows of a run: the table of `columns`, each with its course."""
    records = run.metrics()
    return render_page("fragment.html", name=str(run.files.path), heading=heading(records), cells=cells(records, columns))


def _head(run: Reported, diagnosis: Diagnosis, *, several: bool) -> dict[str, Any]:
    found = [(one.rule.title, diagnosis.when(one), one.evidence, one.rule.cause, one.rule.remedy) for one in diagnosis.findings]
    shown = {"name": run.name, "of": f" of {run.name}" if several else "", "evaluations": run.evaluations}
    return shown | {"heading": heading(run.records) if run.records else "no steps yet", "diagnosis": diagnosis, "found": found}


def _charts(runs: Sequence[Reported], marks: Sequence[Any]) -> list[Panel]:
    """The curves of all runs together, each run's times behind them; what has no group of its own comes last."""
    curves = panels({run.name: run.records for run in runs}, marks=marks)
    of_times = [replace(panel, title=f"{panel.title}: {run.name}") for run in runs for panel in run.times]
    return sorted([*curves, *of_times], key=lambda panel: panel.group == MORE)


def _figures(runs: Sequence[Reported], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """One run: its table of first, last and best values. Several: the last value of each, and the best where one is better."""
    if len(runs) == 1:
        return cells(runs[0].records, columns)
    rows = [("metric, last value (best)", *(run.name for run in runs))]
    for column in columns:
        courses = [[record.values[column.metric] for record in run.records if column.metric in record.values] for run in runs]
        if any(courses):
            rows.append((column.label, *(_last_and_best(column, values) if values else "" for values in courses)))
    return rows


def _last_and_best(column: Column, values: Sequence[float]) -> str:
    best = column.best(values)
    return column.text(values[-1]) + (f" ({column.text(best)})" if best is not None else "")


def differences(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The settings that are not the same in all runs, in the order of the first, below their names; without the directories, which never
    are."""
    settings = [dict(flat(config)) for config in configs.values()]
    keys = dict.fromkeys(key for own in settings for key in own if key != "run.directory")
    values = {key: [own.get(key, "") for own in settings] for key in keys}
    rows = [(key, *(cell(str(value), _VALUE_CHARS) for value in own)) for key, own in values.items() if any(one != own[0] for one in own)]
    return [("setting", *configs), *rows] if rows else []


def _samples(runs: Sequence[Reported]) -> list[tuple[str, Samples]]:
    """The columns of responses: the first run's before, and all runs' after."""
    of = [f"{run.name} " if len(runs) > 1 else "" for run in runs]
    before = [(f"{name}before (step {run.before.step})", run.before) for name, run in zip(of[:1], runs[:1], strict=True) if run.before]
    return before + [(f"{name}after (step {run.after.step})", run.after) for name, run in zip(of, runs, strict=True) if run.after]


def _asked(samples: Sequence[Samples]) -> list[tuple[str, tuple[str, ...], list[SampleRow | None]]]:
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
