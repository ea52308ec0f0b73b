"""Several runs side by side: their curves, their final figures, the settings in which they differ, and samples of the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Query
from nicegui import run as background
from nicegui import ui

from aligner.settings.schema import flat
from aligner.studio.curves import Curves
from aligner.studio.runs import Run
from aligner.studio.runs_page import MOST_COMPARED
from aligner.studio.samples import Samples
from aligner.studio.shared import Studio, found, frame, later

REFRESH_SECONDS = 5.0


def register(studio: Studio) -> None:
    """Serve the page at `/compare?run=A&run=B`."""

    @ui.page("/compare")
    def page(run: list[str] = Query(default=[])) -> None:  # noqa: B008  FastAPI's way to read a repeated parameter
        names = list(dict.fromkeys(run))[:MOST_COMPARED]

        async def build() -> None:
            runs = [await found(studio, name) for name in names]
            if runs and all(runs):
                await _build([one for one in runs if one is not None])

        with frame("Compare"):
            later(build)


async def _build(runs: Sequence[Run]) -> None:
    curves = Curves(runs)
    await curves.build()

    async def refresh() -> None:
        await background.io_bound(lambda: [run.look() for run in runs])
        await curves.refresh()

    ui.timer(REFRESH_SECONDS, refresh, immediate=False)
    _table("Last figures", runs, await background.io_bound(last_figures, runs))
    _table("Settings that differ", runs, await background.io_bound(differing_settings, runs))
    ui.label("Samples of the same prompts").classes("text-h6")
    await Samples(runs).build()


def _table(title: str, runs: Sequence[Run], rows: Sequence[dict[str, str]]) -> None:
    ui.label(title).classes("text-h6")
    columns = [{"name": "key", "label": "", "field": "key", "align": "left", "sortable": True}]
    columns += [{"name": str(i), "label": run.name, "field": str(i), "align": "left"} for i, run in enumerate(runs)]
    ui.table(columns=columns, rows=list(rows), row_key="key", pagination=25).classes("w-full").props("dense wrap-cells")


def last_figures(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The newest value of each metric that at least one run has."""
    newest: list[dict[str, float]] = []
    for run in runs:
        values: dict[str, float] = {}
        for record in run.steps[-50:]:  # a validation may be some steps ago
            values |= record.values
        newest.append(values)
    names = sorted(set().union(*newest))
    return [{"key": name} | {str(i): f"{values[name]:.5g}" if name in values else "" for i, values in enumerate(newest)} for name in names]


def differing_settings(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Every key that does not have one value in all runs."""
    settings: list[dict[str, Any]] = [dict(flat(run.config)) for run in runs]
    keys = sorted(set().union(*settings))
    shown = [{key: _text(values[key]) if key in values else "not set" for key in keys} for values in settings]
    return [{"key": key} | {str(i): one[key] for i, one in enumerate(shown)} for key in keys if len({one[key] for one in shown}) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
