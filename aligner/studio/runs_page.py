"""The first page: every run below the folder."""

from __future__ import annotations

from nicegui import run as background
from nicegui import ui

from aligner.studio.shared import Studio, frame


def register(studio: Studio) -> None:
    @ui.page("/")
    async def runs() -> None:
        with frame("Runs"):
            for one in await background.io_bound(studio.runs.all):
                ui.link(f"{one.name} {one.state.kind}", f"/run/{one.name}")
