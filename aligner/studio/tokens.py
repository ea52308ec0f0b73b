"""A response token by token, colored by one of its numbers: log-probs, their gap, entropy, KL, advantages, values, turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from aligner.types import SampleRow, TokenTable

TOKENS_A_LINE = 64  # at most; a line break of the text ends a line too
_VIEWPORT = "height: 60vh; width: 100%; font-family: monospace"
# Only the lines in view are in the page. A token is {t: text, c: color, n: its numbers}; all of it is shown as text.
_LINE = """<div :key="props.index" style="white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; color: #000">
<span v-for="(token, i) in props.item" :key="i" :style="{backgroundColor: token.c}" :title="token.n">{{ token.t }}</span></div>"""
_LOW, _HIGH, _NONE = (230, 159, 0), (0, 114, 178), "#ffffff"  # orange to blue: distinct for the color-blind


def show_tokens(row: SampleRow) -> None:
    """A dialog with the response of a row that has tokens."""
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
