"""The charts of one or several runs, with how they are drawn: group, horizontal axis, smoothing, scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import run as background, ui

from aligner.reporting.charts import GROUPS, Panel, group_of, panels
from aligner.reporting.diagnosis import Finding
from aligner.reporting.jsonl import StepMetrics
from aligner.studio.runs import Run
from aligner.studio.shared import chart

ALL = "all"
GRID = "display: grid; width: 100%; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr))"


class Curves:
    """Drawn when built, and again by `refresh` if a run has new steps."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._group, self._groups = "", [""]
        self._how: dict[str, Any] = {"against": "step", "smoothing": 0.0, "log": False}  # arguments of `panels`
        self._drawn: tuple[Any, ...] = ()
        self._charts: dict[str, ui.echart] = {}
        self._of: dict[str, str] = {}  # the group of every metric
        self._seen: dict[str, int] = {}  # steps of each run whose metrics are in there
        self.marks: Sequence[Finding] = ()

    async def build(self) -> None:
        with ui.row().classes("w-full items-center gap-4"):
            self._chooser = ui.tabs(on_change=self._choose).props('dense inline-label no-caps aria-label="Group of curves"')
            ui.space()
            axis = ui.toggle({"step": "Steps", "time": "Time"}, value="step").props("no-caps dense")
            axis.on_value_change(lambda event: self._set("against", event.value))
            ui.switch("Logarithmic", on_change=lambda event: self._set("log", event.value))
            ui.label("Smoothing")
            slider = ui.slider(min=0, max=0.98, step=0.02, value=0).props('aria-label="Smoothing" label').classes("w-32")
            slider.on("change", lambda event: self._set("smoothing", min(max(float(event.args), 0.0), 0.98)), throttle=0.2)
        self._grid = ui.element("div").style(GRID)
        await self.refresh()

    async def refresh(self) -> None:
        state = (self._group, *self._how.values(), *((len(run.steps), run.last and run.last.time) for run in self._runs))
        if state == self._drawn:
            return
        self._drawn = state
        await background.io_bound(self._find_groups)
        groups = [group for group in GROUPS if group in self._of.values()]
        if [*groups, ALL] != self._groups and groups:
            self._offer([*groups, ALL])
        self._draw(await background.io_bound(self._panels))

    def _find_groups(self) -> None:
        for run in self._runs:
            for record in run.steps[self._seen.get(run.name, 0) :]:
                for metric in record.values:
                    if metric not in self._of:
                        self._of[metric] = group_of(metric)
            self._seen[run.name] = max(len(run.steps) - 1, 0)  # the last line may grow

    def _panels(self) -> list[Panel]:
        """Those of the chosen group; the others' metrics are not looked at, because a long run has millions of values."""
        if self._group == ALL:
            runs = {run.name: run.steps for run in self._runs if run.steps}
        else:
            wanted = [metric for metric, group in self._of.items() if group == self._group]
            runs = {run.name: [_only(record, wanted) for record in run.steps] for run in self._runs if run.steps}
        return panels(runs, **self._how, marks=self.marks) if runs else []

    def _offer(self, groups: list[str]) -> None:
        self._groups = groups
        self._group = self._group or groups[0]
        self._chooser.clear()
        with self._chooser:
            for group in groups:
                ui.tab(group)
        self._chooser.set_value(self._group)

    def _draw(self, shown: Sequence[Panel]) -> None:
        if list(self._charts) != [panel.title for panel in shown]:
            self._grid.clear()
            with self._grid:
                self._charts = {panel.title: chart(panel) for panel in shown}
            return
        for panel in shown:
            options = self._charts[panel.title].options
            options.clear()
            options.update(panel.option)
            self._charts[panel.title].update()

    async def _choose(self, event: Any) -> None:
        if event.value:
            self._group = str(event.value)
            await self.refresh()

    async def _set(self, name: str, value: Any) -> None:
        self._how[name] = value
        await self.refresh()


def _only(record: StepMetrics, wanted: Sequence[str]) -> StepMetrics:
    values = record.values
    return StepMetrics(step=record.step, time=record.time, values={name: values[name] for name in wanted if name in values})
