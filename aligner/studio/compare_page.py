"""Several runs side by side: their curves, their final figures, the settings in which they differ, and samples of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Query
from nicegui import run as background
from nicegui import ui

from aligner.reporting.samples_report import differences
from aligner.studio.curves import Curves
from aligner.studio.runs import Run
from aligner.studio.runs_page import MOST_COMPARED
from aligner.studio.samples import Samples
from aligner.studio.shared import Studio, found, frame, later, table

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
