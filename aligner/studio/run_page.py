"""One run: curves, where the time goes, samples, findings, settings, logs, checkpoints and the commands that continue from here."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from nicegui import run as background, ui

from aligner.errors import AlignerError, ServerError
from aligner.reporting.charts import Panel, times
from aligner.reporting.evaluations import COLUMNS, read_evaluations
from aligner.reporting.formats import seconds
from aligner.settings.command_line import override
from aligner.studio.curves import Curves
from aligner.studio.form import PLAIN
from aligner.studio.runs import Run, tail
from aligner.studio.samples import Samples
from aligner.studio.shared import Studio, badge, chart, code, found, show_page, table
from aligner.studio.worker import Worker
from aligner.telemetry.terminal import plain

REFRESH_SECONDS = 2.0
LOG_BYTES = 1 << 17
PARTS = ("curves", "time", "samples", "findings", "settings", "logs", "files")


def register(studio: Studio) -> None:
    """Serve the pages at `/run/NAME`; `?part=samples` opens one of PARTS."""

    @ui.page("/run/{name:path}")
    def page(name: str, part: str = "curves") -> None:
        async def build() -> None:
            if (run := await found(studio, name)) is not None:
                await _RunPage(run, studio.planner).build(part if part in PARTS else PARTS[0])

        show_page(name or studio.runs.folder.name, build)


class _RunPage:
    def __init__(self, run: Run, planner: Worker) -> None:
        self._run, self._planner = run, planner
        self._curves = Curves([run])
        self._refreshes: dict[str, Callable[[], Any]] = {}  # of the part that is open
        self._built: set[str] = set()
        self._shown: tuple[Any, ...] = ()  # in the head

    async def build(self, part: str) -> None:
        self._head = ui.row().classes("items-center gap-4")
        self._show_head()
        with ui.tabs(value=part, on_change=self._open).props('no-caps align=left aria-label="Parts"').classes("w-full") as self._tabs:
            for name in PARTS:
                ui.tab(name)
        with ui.tab_panels(self._tabs, value=part, animated=False).classes("w-full").props("keep-alive"):
            self._panels = {name: ui.tab_panel(name).classes("q-px-none") for name in PARTS}
        await self._build_part(part)
        ui.timer(REFRESH_SECONDS, self._refresh, immediate=False)

    async def _open(self, event: Any) -> None:
        await self._build_part(str(event.value))

    async def _build_part(self, part: str) -> None:
        if part in self._built:
            return
        self._built.add(part)
        with self._panels[part]:
            await getattr(self, f"_show_{part}")()

    async def _refresh(self) -> None:
        await background.io_bound(self._run.look)
        self._show_head()
        if refresh := self._refreshes.get(str(self._tabs.value)):
            await refresh()

    def _show_head(self) -> None:
        run = self._run
        last, left = run.last, run.seconds_left()
        if (shown := (run.state, last, run.problem)) == self._shown:
            return
        self._shown = shown
        self._head.clear()
        with self._head:
            badge(run.state.kind)
            progress = f"step {last.step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "") if last else "no steps yet"
            texts = [run.recipe, progress, f"{seconds(left)} left" if left else "", run.state.why]
            ui.label(" · ".join(filter(None, texts)))
            if run.problem:
                ui.label(run.problem).classes("text-negative")

    async def _show_curves(self) -> None:
        await self._curves.build()
        self._refreshes["curves"] = self._refresh_curves

    async def _refresh_curves(self) -> None:
        self._curves.marks = (await background.io_bound(self._run.diagnosis)).findings
        await self._curves.refresh()

    async def _show_time(self) -> None:
        run = self._run
        spans, damaged = await background.io_bound(run.view.spans)
        for panel in times(run.steps, spans):
            chart(panel)
        place = ui.column().classes("w-full")
        if damaged:
            ui.label(f"{damaged} lines of the trace cannot be read")
        ui.label("Against the plan, and the trace for ui.perfetto.dev:")
        code(f"aligner plan --against {shlex.quote(str(run.files.path))}")
        code(f"aligner trace {shlex.quote(str(run.files.path))}")
        with place:
            waiting = ui.label("planning the run, to compare it with its plan ...").classes("muted")
            try:
                panel = Panel(**await self._planner.ask("against", str(run.files.path), []))
            except ServerError as error:
                waiting.text = f"no plan to compare with: {error}"
                return
            place.clear()
            chart(panel)

    async def _show_samples(self) -> None:
        await Samples([self._run]).build()

    async def _show_findings(self) -> None:
        judged = await background.io_bound(self._run.diagnosis)
        if not judged.findings:
            ui.label("Nothing found." if self._run.steps else "No steps yet.")
        for finding in judged.findings:
            with ui.card().classes("w-full"):
                ui.label(finding.rule.title).classes("text-subtitle1")
                ui.label(f"Steps {judged.when(finding)}: {finding.evidence}")
                ui.label(f"Likely cause: {finding.rule.cause}")
                ui.label(f"Remedy: {finding.rule.remedy}")
        for evaluation in await background.io_bound(self._evaluations):
            table(f"{evaluation['model']}, {evaluation['time']}", [COLUMNS, *evaluation["rows"]])

    def _evaluations(self) -> list[dict[str, Any]]:
        try:
            return read_evaluations(self._run.files.evaluations)
        except (AlignerError, OSError) as error:
            self._run.problem = str(error)
            return []

    async def _show_settings(self) -> None:
        config = await background.io_bound(lambda: self._run.config)
        differing = ui.column().classes("w-full")
        with ui.expansion("config.yaml").classes("w-full"):
            code(yaml.safe_dump(config, sort_keys=False) if config else "no settings yet")
        changed = await self._changed()
        with differing:
            ui.label("Different from the recipe's defaults").classes("text-subtitle1")
            code("\n".join(f"{key}={_shown(value)}" for key, value in sorted(changed.items())) or "nothing")

    async def _show_logs(self) -> None:
        names = await background.io_bound(lambda: sorted(path.name for path in self._run.files.logs.glob("*.log")))
        if not names:
            ui.label("No logs yet.")
            return
        first = next((name for name in names if not name.startswith("launcher")), names[0])
        chooser = ui.select(names, value=first, label="Log").classes("w-64")
        shown = code("")

        async def show(*_: Any) -> None:
            text = await background.io_bound(self._log, str(chooser.value))
            if text != shown.text:
                shown.set_text(text)

        chooser.on_value_change(show)
        self._refreshes["logs"] = show
        await show()

    def _log(self, name: str) -> str:
        path = self._run.files.logs / Path(name).name
        try:
            return plain("\n".join(tail(path, LOG_BYTES))) or "empty"
        except OSError as error:
            return f"cannot be read: {error}"

    async def _show_files(self) -> None:
        table("Checkpoints", await background.io_bound(self._checkpoints))
        here = shlex.quote(str(self._run.files.path))
        recipe, changed = self._run.recipe or "RECIPE", await self._changed()
        ui.label("Commands").classes("text-subtitle1")
        for about, command in (
            ("Continue, with the settings it has", command_line(recipe, changed)),
            ("Talk with the newest policy", f"aligner chat {here}"),
            ("Serve it to OpenAI clients", f"aligner serve {here}"),
            ("Measure it", f"aligner eval {here}"),
            ("Export to Hugging Face's format", f"aligner convert --from-megatron {here}/checkpoints/policy --to-hf DIR"),
            ("Write the report", f"aligner report {here}"),
        ):
            ui.label(about).classes("text-caption")
            code(command)

    async def _changed(self) -> dict[str, Any]:
        """The settings that differ from the recipe's defaults; none if they cannot be compared, as those of another version."""
        try:
            found = await self._planner.ask("changed", str(self._run.files.path), [self._run.recipe])
        except ServerError as error:
            self._run.problem = str(error)
            return {}
        return dict(found["changed"])

    def _checkpoints(self) -> list[tuple[str, ...]]:
        found = []
        for folder in sorted(path for path in self._run.files.checkpoints.glob("*") if path.is_dir()):
            pointers = {name: _text(folder / name) for name in ("latest", "best")}
            for step in sorted(folder.glob("step_*")):
                marks = [name for name, target in pointers.items() if target == step.name]
                when = time.strftime("%Y-%m-%d %H:%M", time.localtime(step.stat().st_mtime))
                found.append((folder.name, step.name, when, ", ".join(marks)))
        return [("of", "checkpoint", "written", "is"), *found] if found else []


def command_line(recipe: str, changed: Mapping[str, Any]) -> str:
    """What continues a run of the recipe with these settings, as typed in a shell."""

    def typed(key: str, value: Any) -> str:
        return f"{key}={value}" if isinstance(value, str) and PLAIN.fullmatch(value) else override(key, value)

    return shlex.join(["aligner", "launch", "local", recipe, *itertools.starmap(typed, changed.items())])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
