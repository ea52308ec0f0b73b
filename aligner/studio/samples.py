"""Sample rollouts and responses to validation prompts, of one run by step, or of several runs for the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import run as background
from nicegui import ui

from aligner.data.vision import ImageStore
from aligner.errors import AlignerError
from aligner.reporting.rollout_table import read_rows
from aligner.reporting.samples_report import image_of
from aligner.studio.curves import GRID
from aligner.studio.runs import Run
from aligner.studio.tokens import show_tokens
from aligner.types import FinishReason, SampleRow

PAGE = 20  # prompts that are shown at once
BOX = "white-space: pre-wrap; overflow: auto; max-height: 20rem; overflow-wrap: anywhere"
KINDS = {"rollouts": "Rollouts", "validation": "Validation"}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which samples are shown."""

    text: str = ""
    least: float = -math.inf
    most: float = math.inf
    only_truncated: bool = False

    def admits(self, row: SampleRow) -> bool:
        """A reward that is not a number is shown unless a bound is set."""
        bounded = self.least > -math.inf or self.most < math.inf
        in_bounds = self.least <= row.reward <= self.most if bounded else True
        found = not self.text or self.text.lower() in f"{row.prompt}\n{row.response}".lower()
        return in_bounds and found and (not self.only_truncated or row.finish_reason is FinishReason.length)


class Samples:
    """Of one run: by kind and step. Of several: the newest step that each has, prompt by prompt."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._kind = "rollouts" if len(runs) == 1 else "validation"
        self._step: int | None = None
        self._filter = Filter()
        self._page = 1

    async def build(self) -> None:
        with ui.row().classes("w-full items-center gap-4"):
            ui.toggle(KINDS, value=self._kind, on_change=lambda event: self._set(kind=event.value)).props("no-caps dense")
            self._steps = ui.select([], label="Step", on_change=lambda event: self._set(step=event.value)).classes("w-32")
            ui.input("Search", on_change=lambda event: self._set(text=event.value or "")).props("clearable debounce=300").classes("w-64")
            ui.number("Reward from", on_change=lambda event: self._set(least=_bound(event.value, -math.inf))).classes("w-32")
            ui.number("to", on_change=lambda event: self._set(most=_bound(event.value, math.inf))).classes("w-32")
            ui.switch("Truncated only", on_change=lambda event: self._set(only_truncated=bool(event.value)))
        self._shown = ui.column().classes("w-full gap-4")
        await self._show()

    async def _set(self, *, kind: str = "", step: int | None = None, **changed: Any) -> None:
        if kind:
            self._kind, self._step = kind, None
        elif step is not None:
            self._step = step
        values = {name: getattr(self._filter, name) for name in Filter.__slots__}
        self._filter, self._page = Filter(**{**values, **changed}), 1
        await self._show()

    async def _show(self) -> None:
        steps = await background.io_bound(lambda: sorted({step for run in self._runs for step in self._files(run)}))
        if len(self._runs) == 1 and self._step not in steps:
            self._step = steps[-1] if steps else None
        self._steps.set_options(steps, value=self._step)
        self._shown.clear()
        try:
            found = await background.io_bound(self._read)
        except (AlignerError, OSError, ValueError) as error:  # damaged, unreadable, not text
            with self._shown:
                ui.label(str(error)).classes("text-negative")
            return
        prompts = list(found.items())
        with self._shown:
            if not prompts:
                ui.label("No samples." if not steps else "No sample fits the filter.")
            for (prompt, images), answers in prompts[(self._page - 1) * PAGE : self._page * PAGE]:
                self._group(prompt, images, answers)
            if len(prompts) > PAGE:
                ui.pagination(1, -(-len(prompts) // PAGE), value=self._page, on_change=self._turn)

    async def _turn(self, event: Any) -> None:
        self._page = int(event.value)
        await self._show()

    def _files(self, run: Run) -> dict[int, Path]:
        folder = run.files.rollouts if self._kind == "rollouts" else run.files.validation
        return {int(path.stem.removeprefix("step_")): path for path in folder.glob("step_*.jsonl") if path.stem[5:].isdigit()}

    def _read(self) -> dict[tuple[str, tuple[str, ...]], list[tuple[str, SampleRow]]]:
        """The samples by prompt and images, each with its run's name; a prompt all of whose answers are filtered out is left out."""
        found: dict[tuple[str, tuple[str, ...]], list[tuple[str, SampleRow]]] = {}
        for run in self._runs:
            files = self._files(run)
            step = self._step if self._step in files else max(files, default=None)
            for row in read_rows(files[step]) if step is not None else []:
                found.setdefault((row.prompt, row.images), []).append((f"{run.name}, step {step}", row))
        return {key: rows for key, rows in found.items() if any(self._filter.admits(row) for _, row in rows)}

    def _group(self, prompt: str, images: tuple[str, ...], answers: Sequence[tuple[str, SampleRow]]) -> None:
        with ui.card().classes("w-full"):
            ui.label(prompt).style(BOX).classes("text-body2 text-grey-8")
            with ui.row():
                for digest in images:
                    if uri := image_of([ImageStore(run.files.images) for run in self._runs], digest):
                        ui.image(uri).style("width: 160px").props('alt="image of the prompt"')
            with ui.element("div").style(GRID):
                for name, row in answers:
                    with ui.column().classes("gap-1" if self._filter.admits(row) else "gap-1 opacity-40"):
                        with ui.row().classes("items-center gap-2"):
                            ui.label(f"{row.reward:+.3f}").classes("text-weight-bold")
                            if row.finish_reason is not FinishReason.stop:
                                ui.badge(row.finish_reason.value).props("color=amber-3 text-color=black")
                            if len(self._runs) > 1:
                                ui.label(name).classes("text-caption")
                            if row.parts:
                                ui.label(", ".join(f"{part} {value:.3g}" for part, value in row.parts.items())).classes("text-caption")
                            if row.tokens is not None:
                                ui.button("Tokens", on_click=partial(show_tokens, row)).props("flat dense no-caps size=sm")
                        ui.label(row.response).style(BOX).classes("text-body2")


def _bound(value: float | None, missing: float) -> float:
    return missing if value is None else float(value)
