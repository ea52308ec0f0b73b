"""What the pages share: the studio that they show, and the frame around each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nicegui import ui

from aligner.studio.runs import Runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Studio:
    """`read_only`: pages start nothing and write nothing."""

    runs: Runs
    read_only: bool = False


LINKS = {"Runs": "/"}


@contextmanager
def frame(title: str) -> Iterator[None]:
    """The page's header with the links to the others, and its body within."""
    ui.page_title(f"{title} - aligner studio")
    ui.colors(primary="#1d4ed8")
    with ui.header().classes("items-center q-py-xs gap-4"):
        ui.label("aligner studio").classes("text-subtitle1 text-weight-medium")
        with ui.element("nav").props('aria-label="Pages"').classes("row gap-4"):
            for name, target in LINKS.items():
                ui.link(name, target).classes("text-white")
    with ui.element("main").classes("w-full column gap-4 q-pa-md"):
        ui.label(title).classes("text-h5").props('role="heading" aria-level="1"')
        yield
