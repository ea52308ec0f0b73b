"""The first page: every run below the folder, with what it does and how far it is; live, filtered, compared, put away.

Another page compares runs: their curves, their final figures, the settings in which they differ, and samples of the same prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Query
from nicegui import run as background, ui

from aligner.reporting.formats import seconds, stretches
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.samples_report import differences
from aligner.studio.curves import Curves
from aligner.studio.runs import Run
from aligner.studio.samples import Samples
from aligner.studio.shared import Studio, found, show_page, state_badge, table

REFRESH_SECONDS, COMPARE_SECONDS = 2.0, 5.0
MOST_COMPARED = 8
_MAIN = ("rollout/reward", "reward/accuracy", "preference/accuracy", "kto/accuracy", "validation/reward", "validation/accuracy")
_SPARK_POINTS, _SPARK_WIDTH, _SPARK_HEIGHT = 40, 120, 24

_COLUMNS = [
    {"name": "name", "label": "Run", "field": "name", "align": "left", "sortable": True},
    {"name": "recipe", "label": "Recipe", "field": "recipe", "align": "left", "sortable": True},
    {"name": "state", "label": "State", "field": "state", "align": "left", "sortable": True},
    {"name": "step", "label": "Step", "field": "step", "align": "left", "sortable": True},
    {"name": "metric", "label": "Reward, accuracy or loss", "field": "value", "align": "left", "sortable": True},
    {"name": "changed", "label": "Last step", "field": "time", "align": "left", "sortable": True},
]
_NAME = '<q-td :props="props"><a class="text-primary" :href="props.row.link">{{ props.row.name }}</a></q-td>'
_STATE = """<q-td :props="props"><q-badge :color="props.row.colour" :text-color="props.row.ink">{{ props.row.state }}</q-badge>
<div class="text-caption" style="max-width: 22rem; white-space: normal">{{ props.row.why }}</div></q-td>"""
_STEP = """<q-td :props="props">{{ props.row.progress }}
<q-linear-progress v-if="props.row.share > 0" :value="props.row.share" size="4px" :aria-label="'progress of ' + props.row.name" /></q-td>"""
_METRIC = f"""<q-td :props="props"><div class="row items-center no-wrap gap-2">
<svg v-if="props.row.spark" width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" aria-hidden="true">
<polyline :points="props.row.spark" fill="none" stroke="#0072B2" stroke-width="1.5" /></svg>
<span>{{{{ props.row.figure }}}}</span></div></q-td>"""
_CHANGED = '<q-td :props="props">{{ props.row.changed }}</q-td>'


def register(studio: Studio) -> None:
    """Serve the pages at `/` and at `/compare?run=A&run=B`."""

    @ui.page("/")
    def page() -> None:
        show_page("Runs", _Table(studio).build)

    @ui.page("/compare")
    def compare(run: list[str] = Query(default=[])) -> None:  # noqa: B008  FastAPI's way to read a repeated parameter
        names = list(dict.fromkeys(run))[:MOST_COMPARED]

        async def build() -> None:
            runs = [await found(studio, name) for name in names]
            if runs and all(runs):
                await _compare([one for one in runs if one is not None])

        show_page("Compare", build)


class _Table:
    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._shows_archived = False

    async def build(self) -> None:
        with ui.row().classes("w-full items-center gap-4"):
            search = ui.input("Filter by name, recipe or state").props("clearable dense").classes("w-72")
            self._compare = ui.button("Compare", on_click=self._open_comparison).props("outline")
            self._archive = ui.button("Archive", on_click=self._put_away).props('outline aria-label="Archive"')
            self._archive.set_visibility(not self._studio.read_only)
            ui.switch("Archived", on_change=self._switch).props('aria-label="Show archived runs"')
        self._table = ui.table(
            columns=_COLUMNS, rows=await self._rows(), row_key="name", selection="multiple", pagination={"rowsPerPage": 50, "sortBy": None}
        ).classes("w-full")
        self._table.bind_filter_from(search, "value")
        self._table.on_select(lambda _: self._selected())
        for name, template in (("name", _NAME), ("state", _STATE), ("step", _STEP), ("metric", _METRIC), ("changed", _CHANGED)):
            self._table.add_slot(f"body-cell-{name}", template)
        self._table.add_slot("header-selection", '<q-checkbox v-model="props.selected" aria-label="Select all" />')
        self._table.add_slot("body-selection", """<q-checkbox v-model="props.selected" :aria-label="'Select ' + props.row.name" />""")
        self._table.add_slot("no-data", "<span>No runs below this folder yet.</span>")
        self._selected()
        ui.timer(REFRESH_SECONDS, self._refresh, immediate=False)

    async def _rows(self) -> list[dict[str, Any]]:
        runs, archived = await background.io_bound(lambda: (self._studio.runs.all(), self._studio.runs.archived))
        return [row(run) for run in runs if (run.name in archived) == self._shows_archived]

    async def _refresh(self) -> None:
        rows = await self._rows()
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()

    async def _switch(self, event: Any) -> None:
        self._shows_archived = bool(event.value)
        name = "Restore" if self._shows_archived else "Archive"
        self._archive.set_text(name)
        self._archive.props(f'aria-label="{name}"')
        await self._deselect()

    def _selected(self) -> None:
        count = len(self._table.selected)
        self._compare.set_enabled(2 <= count <= MOST_COMPARED)
        self._archive.set_enabled(count > 0)

    def _names(self) -> list[str]:
        return [str(chosen["name"]) for chosen in self._table.selected]

    def _open_comparison(self) -> None:
        ui.navigate.to("/compare?" + urlencode([("run", name) for name in self._names()]))

    async def _put_away(self) -> None:
        if self._studio.read_only:
            return
        runs, names = self._studio.runs, set(self._names())
        try:
            await background.io_bound(runs.archive, runs.archived - names if self._shows_archived else runs.archived | names)
        except OSError as error:
            ui.notify(f"could not be written: {error}", type="negative")
        await self._deselect()

    async def _deselect(self) -> None:
        self._table.selected = []
        self._selected()
        await self._refresh()


def row(run: Run) -> dict[str, Any]:
    colour, ink = state_badge(run.state.kind)
    last, most = run.last, run.max_steps
    step = last.step if last else 0
    left = run.seconds_left()
    progress = f"{step:,}" + (f" of {most:,}" if most else "") + (f", {seconds(left)} left" if left else "")
    name, spark = main_metric(run.steps)
    value = next((record.values[name] for record in reversed(run.steps) if name in record.values), None) if name else None
    return {
        "name": run.name,
        "link": f"run/{quote(run.name.removeprefix('.'))}",  # a browser takes /run/. for /run/
        "recipe": run.recipe,
        "state": run.state.kind,
        "why": run.problem or run.state.why,
        "colour": colour,
        "ink": ink,
        "step": step,
        "progress": progress if last else "",
        "share": min(step / most, 1.0) if most else 0.0,
        "value": value if value is not None and math.isfinite(value) else None,
        "figure": f"{name} {value:.4g}" if value is not None else "",
        "spark": spark,
        "time": last.time if last else 0.0,
        "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(last.time)) if last else "",
    }


def main_metric(steps: list[StepMetrics]) -> tuple[str, str]:
    """The metric that people look at first, and its course as points of an SVG line; empty without one."""
    names = steps[-1].values.keys() | steps[0].values.keys() if steps else set()
    losses = sorted(name for name in names if name.endswith("/loss") and not name.startswith("validation/"))
    name = next((one for one in (*_MAIN, *losses) if one in names), "")
    values = [value for step in steps if math.isfinite(value := step.values.get(name, math.nan))]
    means = [sum(part) / len(part) for part in stretches(values, _SPARK_POINTS)] if len(values) > 1 else []
    if not means:
        return name, ""
    low, span = min(means), (max(means) - min(means)) or 1.0
    width = (_SPARK_WIDTH - 2) / max(len(means) - 1, 1)
    return name, " ".join(
        f"{1 + i * width:.1f},{_SPARK_HEIGHT - 2 - (mean - low) / span * (_SPARK_HEIGHT - 4):.1f}" for i, mean in enumerate(means)
    )


async def _compare(runs: Sequence[Run]) -> None:
    curves = Curves(runs)
    await curves.build()

    async def refresh() -> None:
        await background.io_bound(lambda: [run.look() for run in runs])
        await curves.refresh()

    ui.timer(COMPARE_SECONDS, refresh, immediate=False)
    table("Last figures", await background.io_bound(last_figures, runs))
    table("Settings that differ", await background.io_bound(lambda: differences({run.name: run.config for run in runs})))
    ui.label("Samples of the same prompts").classes("text-h6")
    await Samples(runs).build()


def last_figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The newest value of each metric that at least one run has."""
    newest: list[dict[str, float]] = []
    for run in runs:
        values: dict[str, float] = {}
        for record in run.steps[-50:]:  # a validation may be some steps ago
            values |= record.values
        newest.append(values)
    rows = [(name, *(f"{own[name]:.5g}" if name in own else "" for own in newest)) for name in sorted(set().union(*newest))]
    return [("metric", *(run.name for run in runs)), *rows]
