"""What the pages share: the studio that they show, and what is around and in each of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nicegui import run as background, ui

from aligner.reporting.charts import Panel
from aligner.studio.runs import Run, Runs
from aligner.studio.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Studio:
    """`read_only`: pages start nothing and write nothing. A long look at data, by the `reader`, delays no plan."""

    runs: Runs
    read_only: bool = False
    planner: Worker = field(default_factory=Worker)
    reader: Worker = field(default_factory=Worker)


BLUE = "#1d4ed8"
LINKS = {"Runs": "/", "New run": "/new", "Chat": "/chat"}
# Colours of a state and of the text on it, with a contrast of at least 4.5.
_BADGES = {
    "running": ("blue-8", "white"),
    "stalled": ("amber-3", "black"),
    "queued": ("grey-4", "black"),
    "failed": ("red-9", "white"),
    "stopped": ("grey-8", "white"),
    "done": ("green-9", "white"),
}


def state_badge(kind: str) -> tuple[str, str]:
    """Quasar's colours of a state: ground and text."""
    return _BADGES.get(kind, ("grey-4", "black"))


# Quasar's colors for texts are too dark on its dark ground, and its mark of the focus is faint.
STYLE = """<style>
.muted { color: #4b5563 } .body--dark .muted { color: #c4c9d4 }
.body--dark { --q-primary: #9db9ff !important; --q-negative: #ff9a92 !important; --q-positive: #7ddf9a !important }
.body--dark .bg-primary { --q-primary: #1d4ed8 }
:focus-visible { outline: 2px solid currentColor; outline-offset: 2px }
.no-outline:focus-visible { box-shadow: 0 0 0 2px currentColor }
</style>"""


def show_page(title: str, build: Callable[[], Awaitable[None]]) -> None:
    """The header with the links to the other pages, and the body, which `build` makes once the browser has the rest: what it reads may take
    longer than a browser's patience."""
    ui.page_title(f"{title} - aligner studio")
    ui.colors(primary=BLUE, negative="#b91c1c", positive="#15803d")
    with ui.header().classes("items-center q-py-xs gap-4").style(f"background: {BLUE}"):
        ui.label("aligner studio").classes("text-subtitle1 text-weight-medium")
        with ui.element("nav").props('aria-label="Pages"').classes("row gap-4"):
            for name, target in LINKS.items():
                ui.link(name, target).classes("text-white")
    with ui.element("main").classes("w-full column gap-4 q-pa-md"):
        ui.label(title).classes("text-h5").props('role="heading" aria-level="1"')
        with ui.column().classes("w-full gap-4") as body:
            ui.spinner(size="lg").props('role="status" aria-label="Reading"')

        async def fill() -> None:
            body.clear()
            with body:
                await build()

        ui.timer(0.01, fill, once=True)


def badge(kind: str) -> None:
    colour, ink = state_badge(kind)
    ui.badge(kind).props(f"color={colour} text-color={ink}")


def chart(panel: Panel) -> ui.echart:
    """A card with the panel."""
    with ui.card().classes("w-full q-pa-sm"):
        ui.label(panel.title).classes("text-subtitle2")
        drawn = ui.echart(panel.option).style(f"height: {panel.height}px; width: 100%").props('role="img"')
    drawn.props["aria-label"] = f"chart: {panel.title}"
    return drawn


def table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Texts below a header, which is the first row."""
    ui.label(title).classes("text-h6").props('role="heading" aria-level="2"')
    header, *others = rows or [["none"]]
    columns = [{"name": str(i), "label": name, "field": str(i), "align": "left", "sortable": True} for i, name in enumerate(header)]
    cells = [{str(i): text for i, text in enumerate(row)} for row in others]
    ui.table(columns=columns, rows=cells, pagination=25 if len(cells) > 25 else None).classes("w-full").props("dense wrap-cells")


def code(text: str) -> ui.label:
    """Text in a fixed-width font that scrolls in its own box."""
    style = "white-space: pre; overflow: auto; max-height: 60vh; width: 100%; font-family: monospace"
    return ui.label(text).style(style).classes("text-body2 q-pa-sm rounded-borders").props('tabindex="0"')


def outlined(entry: Any, style: str = "min-width: 11rem", hint: str = "") -> Any:
    """The entry, in the form's look."""
    entry.props["hint"] = hint or None
    return entry.props("dense outlined options-dense hide-bottom-space").style(style)


async def found(studio: Studio, name: str) -> Run | None:
    """The run of this name; without one the page says so."""
    run = await background.io_bound(studio.runs.get, name)
    if run is None:
        ui.label(f"There is no run {name!r} below this folder.")
    return run
