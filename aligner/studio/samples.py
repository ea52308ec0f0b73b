"""Sample rollouts and responses to validation prompts: of one run by step, of its first and last step, or of several runs, by prompt.

A response can be seen token by token, colored by one of its numbers: log-probs, their gap, entropy, KL, advantages, values, turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nicegui import run as background, ui

from aligner.data.vision import ImageStore
from aligner.errors import AlignerError
from aligner.reporting.rollout_table import read_rows
from aligner.reporting.samples_report import image_of
from aligner.studio.curves import GRID
from aligner.studio.runs import Run
from aligner.types import FinishReason, SampleRow, TokenTable

PAGE = 20  # prompts that are shown at once
NEWEST, BOTH = -1, -2  # in place of a step
BOX = "white-space: pre-wrap; overflow: auto; max-height: 20rem; overflow-wrap: anywhere"
KINDS = {"rollouts": "Rollouts", "validation": "Validation"}


@dataclass(frozen=True, slots=True)
class Filter:
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, or all rows of a session, which share a reward; `of` names its run and step."""

    of: str
    rows: Sequence[SampleRow]


Prompts = dict[tuple[str, tuple[str, ...]], list[Answer]]  # by text and images


class Samples:
    """By kind and step; of several runs the newest step that each has, unless another is chosen."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._kind = "rollouts" if len(runs) == 1 else "validation"
        self._step = NEWEST
        self._filter = Filter()
        self._page = 1

    async def build(self) -> None:
        with ui.row().classes("w-full items-center gap-4"):
            ui.toggle(KINDS, value=self._kind, on_change=lambda event: self._set(kind=event.value)).props("no-caps dense")
            self._steps = ui.select({}, label="Step", on_change=lambda event: self._set(step=event.value)).classes("w-40")
            ui.input("Search", on_change=lambda event: self._set(text=event.value or "")).props("clearable debounce=300").classes("w-64")
            ui.number("Reward from", on_change=lambda event: self._set(least=_bound(event.value, -math.inf))).classes("w-32")
            ui.number("to", on_change=lambda event: self._set(most=_bound(event.value, math.inf))).classes("w-32")
            ui.switch("Truncated only", on_change=lambda event: self._set(only_truncated=bool(event.value)))
        self._shown = ui.column().classes("w-full gap-4")
        await self._show()

    async def _set(self, *, kind: str = "", step: int | None = None, **changed: Any) -> None:
        if step == self._step:  # the list was only offered anew
            return
        if kind:
            self._kind, self._step = kind, NEWEST
        elif step is not None:
            self._step = step
        self._filter, self._page = replace(self._filter, **changed), 1
        await self._show()

    async def _show(self) -> None:
        steps = await background.io_bound(lambda: sorted({step for run in self._runs for step in self._files(run)}))
        several = {BOTH: "before and after"} if len(steps) > 1 else {}
        newest = {NEWEST: f"newest: {steps[-1]}" if steps else "newest"}
        self._steps.set_options({**newest, **several} | {step: str(step) for step in steps}, value=self._step)
        problem, found = "", Prompts()
        try:
            found = await background.io_bound(self._read)
        except (AlignerError, OSError, ValueError) as error:  # damaged, unreadable, not text
            problem = str(error)
        self._shown.clear()  # not before: another choice may have been shown meanwhile
        with self._shown:
            if problem:
                ui.label(problem).classes("text-negative")
                return
            prompts = list(found.items())
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

    def _read(self) -> Prompts:
        """The samples by prompt; one all of whose answers are filtered out is left out, and before and after one that only one step has."""
        found: Prompts = {}
        for run in self._runs:
            files = self._files(run)
            for step in _chosen(sorted(files), self._step):
                for _, rows in groupby(read_rows(files[step]), key=lambda row: id(row) if row.episode is None else row.episode):
                    answer = Answer(f"{run.name}, step {step}", list(rows))
                    found.setdefault((answer.rows[0].prompt, answer.rows[0].images), []).append(answer)
        least = 2 if self._step == BOTH else 1
        return {key: own for key, own in found.items() if any(map(self._admits, own)) and len({one.of for one in own}) >= least}

    def _admits(self, answer: Answer) -> bool:
        return any(map(self._filter.admits, answer.rows))

    def _group(self, prompt: str, images: tuple[str, ...], answers: Sequence[Answer]) -> None:
        with ui.card().classes("w-full"):
            ui.label(prompt).style(BOX).classes("text-body2 muted").props('tabindex="0"')
            with ui.row():
                for digest in images:
                    if uri := image_of([ImageStore(run.files.images) for run in self._runs], digest):
                        ui.image(uri).style("width: 160px").props('alt="image of the prompt"')
            with ui.element("div").style(GRID):
                for answer in answers:
                    self._show_answer(answer)

    def _show_answer(self, answer: Answer) -> None:
        rows, first = answer.rows, answer.rows[0]
        told = [answer.of] if len(self._runs) > 1 or self._step == BOTH else []
        told += [f"session {first.episode} of {len(rows)} branches"] if len(rows) > 1 else []
        told += [f"{part} {value:.3g}" for part, value in first.parts.items()]
        told += [] if self._admits(answer) else ["outside the filter"]
        with ui.column().classes("gap-1"):
            with ui.row().classes("items-center gap-2"):
                ui.label(f"{first.reward:+.3f}").classes("text-weight-bold")
                if rows[-1].finish_reason is not FinishReason.stop:
                    ui.badge(rows[-1].finish_reason.value).props("color=amber-3 text-color=black")
                ui.label(", ".join(told)).classes("text-caption")
            for number, row in enumerate(rows, start=1):
                if len(rows) > 1:
                    ui.label(f"branch {number}").classes("text-caption text-weight-bold")
                if row.tokens is not None:
                    ui.button("Tokens", on_click=partial(show_tokens, row)).props("flat dense no-caps size=sm")
                with ui.element("div").style(BOX).classes("text-body2").props('tabindex="0" role="group" aria-label="Response"'):
                    for turn in row.turns:
                        reward = f", reward {turn.reward:+.3g}" if turn.reward else ""
                        if turn.heard:
                            ui.label(turn.heard).classes("muted")
                        ui.label(f"turn {turn.number + 1}{reward}").classes("text-caption text-weight-bold")
                        ui.label(turn.text)
                    if not row.turns:
                        ui.label(row.response)


def _chosen(steps: Sequence[int], step: int) -> Sequence[int]:
    """Those of a run's steps to show: the newest, if it has not the one that was asked for."""
    if step == BOTH:
        return sorted({*steps[:1], *steps[-1:]})
    return [step] if step in steps else steps[-1:]


def _bound(value: float | None, missing: float) -> float:
    return missing if value is None else float(value)


TOKENS_A_LINE = 64  # at most; a line break of the text ends a line too
_VIEWPORT = "height: 60vh; width: 100%; font-family: monospace"
# Only the lines in view are in the page. A token is {t: text, c: color, n: its numbers}; all of it is shown as text.
_LINE = """<div :key="props.index" style="white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; color: #000">
<span v-for="(token, i) in props.item" :key="i" :style="{backgroundColor: token.c}" :title="token.n">{{ token.t }}</span></div>"""
_LOW, _HIGH, _NONE = (230, 159, 0), (0, 114, 178), "#ffffff"  # orange to blue: distinct for the color-blind


def show_tokens(row: SampleRow) -> None:
    table = row.tokens
    assert table is not None
    numbers = derived(table)
    with ui.dialog() as dialog, ui.card().style("width: 90vw; max-width: 1200px"):
        with ui.row().classes("items-center gap-4 w-full"):
            chosen = ui.select(list(numbers), value=next(iter(numbers)), label="Color by").classes("w-48")
            scale = ui.label()
            ui.space()
            ui.button("Close", on_click=dialog.close).props("flat")
        view = ui.element("q-virtual-scroll").style(_VIEWPORT).classes("bg-white text-black q-pa-sm")
        view.props('tabindex="0" role="region" aria-label="Tokens"')
        view.add_slot("default", _LINE)

        def color() -> None:
            found, low, high = lines(table.texts, numbers, str(chosen.value))
            view._props["items"] = found
            scale.set_text(f"orange {low:.3g} to blue {high:.3g}; {len(table.texts):,} tokens" if low < high else f"{low:.3g} everywhere")
            view.update()

        chosen.on_value_change(color)
        color()
    dialog.on("hide", dialog.delete)
    dialog.open()


def derived(table: TokenTable) -> dict[str, Sequence[float]]:
    """The table's numbers, and differences of its log-probs: the gap of sampler and trainer, and the log-ratio to the reference, whose mean
    over what the policy samples is its KL."""
    numbers: dict[str, Sequence[float]] = dict(table.numbers)
    if {"sampler", "trainer"} <= numbers.keys():
        numbers["gap"] = [abs(a - b) for a, b in zip(numbers["sampler"], numbers["trainer"], strict=True)]
    if {"trainer", "reference"} <= numbers.keys():
        numbers["KL to the reference"] = [a - b for a, b in zip(numbers["trainer"], numbers["reference"], strict=True)]
    return numbers or {"none": [math.nan] * len(table.texts)}


def lines(texts: Sequence[str], numbers: Mapping[str, Sequence[float]], chosen: str) -> tuple[list[list[dict[str, Any]]], float, float]:
    """The tokens in lines, each with its color and the text of its numbers, and the least and the largest finite number of `chosen`."""
    finite = [value for value in numbers[chosen] if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (math.nan, math.nan)
    found: list[list[dict[str, Any]]] = [[]]
    for i, text in enumerate(texts):
        said = ", ".join(f"{name} {values[i]:.4g}" for name, values in numbers.items())
        found[-1].append({"t": text, "c": _color(numbers[chosen][i], low, high), "n": said})
        if text.endswith("\n") or len(found[-1]) == TOKENS_A_LINE:
            found.append([])
    return [line for line in found if line], low, high


def _color(value: float, low: float, high: float) -> str:
    """Orange at the lowest, white in the middle, blue at the highest, each light enough for black text."""
    if not math.isfinite(value) or not low < high:
        return _NONE
    place = (value - low) / (high - low) * 2 - 1
    end, strength = (_HIGH, place) if place > 0 else (_LOW, -place)
    return "#" + "".join(f"{round(255 - (255 - part) * 0.6 * strength):02x}" for part in end)
