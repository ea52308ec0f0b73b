"""A new run without code: a form that becomes overrides, with the plan beside it, and `aligner launch` at its end."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import run as background, ui

from aligner.errors import AlignerError, ServerError
from aligner.reporting.charts import Panel
from aligner.settings.explain import shipped
from aligner.settings.schema import SchemaKey
from aligner.studio import form
from aligner.studio.runs import LAUNCH_LOG, is_run, tail
from aligner.studio.shared import Studio, chart, outlined, show_page
from aligner.studio.worker import PREVIEWED

PAUSE_SECONDS = 0.6  # without a change, before a form is checked
START_SECONDS = 120.0  # for a run to write its first file
MOST_FOUND = 40  # settings that a search shows
PIECE = 4000  # characters of a sample that are shown in one colour
MODELS = "models-of-the-folder"  # id of the list of suggestions
MONO = "white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; font-size: 0.8rem"
_LEFT = "flex: 3 1 30rem; min-width: 0"
_RIGHT = "flex: 2 1 26rem; min-width: 0; position: sticky; top: 4.5rem; max-height: calc(100vh - 5.5rem); overflow: auto"


def register(studio: Studio) -> None:
    @ui.page("/new")
    def new(config: str = "sft") -> None:
        async def build() -> None:
            await suggest(studio)
            await NewRun(studio).show(config if config in form.recipes() else "sft")

        show_page("New run", build)


async def suggest(studio: Studio) -> None:
    """The models of the folder's runs, as suggestions in fields with the property `list=MODELS`."""
    with ui.element("datalist").props(f'id="{MODELS}"'):
        for model in await background.io_bound(form.models_of, studio.runs) or ():
            ui.element("option").props["value"] = model


class NewRun:
    """One tab's form. What it says is lost with the tab; the command, the YAML and the run's files stay."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.keys: list[SchemaKey] = []
        self.values: dict[str, str] = {}
        self.presets: dict[str, str] = {}
        self.typed: dict[str, str] = {}
        self.fields: dict[str, Any] = {}  # the inputs that are shown, by setting
        self.changes, self.is_good = 0, False

    async def show(self, config: str) -> None:
        with ui.row().classes("w-full gap-6 items-start"):
            with ui.column().classes("gap-3").style(_LEFT):
                with ui.row().classes("w-full gap-3 items-start"):
                    self.config = outlined(ui.select(form.recipes(), value=config, label="Recipe", with_input=True))
                    self.name = outlined(ui.input("Name of the run", on_change=self._changed)).classes("grow")
                    places = {"local": "this machine", **({"slurm": "Slurm"} if shutil.which("sbatch") else {})}
                    self.place = outlined(ui.select(places, value="local", label="Where", on_change=self._changed))
                self.groups = ui.row().classes("w-full gap-3")
                with ui.row().classes("w-full gap-3"):
                    self.section = outlined(ui.select([form.IMPORTANT], value=form.IMPORTANT, label="Section", on_change=self._show_fields))
                    self.search = outlined(ui.input("Find a setting", value="", on_change=self._show_fields)).classes("grow")
                self.body = ui.column().classes("w-full gap-2")
                with _card("What the model will see"):
                    ui.label(f"The first {PREVIEWED} records of data.train and data.validation, as the run reads them.")
                    ui.button("Look at the data", on_click=self._look).props("no-caps outline")
                    self.data = ui.column().classes("w-full gap-2").props('aria-live="polite"')
            with ui.column().classes("gap-3 no-wrap").style(_RIGHT):
                self._side()
        self.config.on_value_change(self._choose)
        await self._choose()

    def _side(self) -> None:
        with _card("Plan"):
            self.plan = ui.column().classes("w-full gap-2").props('aria-live="polite"')
        if self.studio.read_only:
            ui.label("This studio is read-only: it starts nothing. The command can be copied.")
        else:
            self.button = ui.button("Start", on_click=self._start).props("no-caps")
        self.said = ui.label().style(MONO).props('role="status"')
        self.command, self.yaml = _copied("command"), _copied("YAML")
        with ui.element("div").classes("w-full").bind_visibility_from(self.place, "value", value="slurm"):
            self.script = _copied("batch script")

    async def _choose(self) -> None:
        """Begin anew with a recipe or one of its configs."""
        if not self.config.value:  # while a name is typed
            return
        self.presets, self.typed = {}, {}
        if known := shipped().get(self.config.value):
            groups, self.keys, self.values = known
        else:
            groups = await self._describe()
        tops = dict.fromkeys(key.key.partition(".")[0] for key in self.keys if key.key != form.DIRECTORY)
        self.section.set_options([form.IMPORTANT, *tops], value=form.IMPORTANT)
        self.groups.clear()
        with self.groups:
            for group, _, presets in (line.partition("=") for line in groups):
                chosen = outlined(ui.select(presets.split("|"), label=f"{group} preset", clearable=True))
                chosen.on_value_change(lambda event, group=group: self._preset(group, event.value or ""))
        self.name.value = form.free_name(self.studio.runs.folder, self.config.value)
        self._show_fields()
        await self._changed()

    async def _preset(self, group: str, preset: str) -> None:
        self.presets[group] = preset
        await self._describe()
        self._show_fields()
        await self._changed()

    async def _describe(self) -> list[str]:
        """Ask for the settings as the presets make them; the groups of presets."""
        chosen = [f"{group}={preset}" for group, preset in self.presets.items() if preset]
        try:
            found = await self.studio.reader.ask("describe", self.config.value, chosen)
        except ServerError as error:
            self.said.text = str(error)
            return []
        self.keys, self.values = [SchemaKey(**key) for key in found["keys"]], found["values"]
        return list(found["groups"])

    def _show_fields(self) -> None:
        found = form.shown(self.keys, self.section.value, self.search.value)
        self.fields = {}
        self.body.clear()
        with self.body:
            for key in found[: MOST_FOUND if self.search.value else None]:
                self.fields[key.key] = self._field(key)
            if len(found) > len(self.fields) or not found:
                ui.label(f"... and {len(found) - len(self.fields)} more" if found else "no setting")

    def _field(self, key: SchemaKey) -> Any:
        usual = form.as_shown(key, self.values.get(key.key, ""))
        value = self.typed.get(key.key, usual)
        options = form.choices(key)
        field: Any = ui.select(options, value=value, label=key.key) if value in options else ui.input(key.key, value=value)
        if key.key.endswith(("model.path", "teacher.path", "judge.path")):
            field.props(f'list="{MODELS}"')

        async def typed(event: Any) -> None:
            self.typed[key.key] = event.value or ""
            await self._changed()

        field.on_value_change(typed)
        return outlined(field, "width: 100%", f"{key.comment} ({key.type})" if key.comment else key.type)

    def _settings(self) -> tuple[Path, list[str]]:
        """Raises ConfigError for a name that is no place for a run."""
        directory = form.directory_of(self.studio.runs.folder, self.name.value)
        return directory, form.overrides_of(self.keys, self.values, self.presets, self.typed, directory)

    async def _changed(self) -> None:
        """Show the command at once, and the plan when there was no change for a moment."""
        self.changes, self.is_good = self.changes + 1, False
        change, self.name.error = self.changes, None
        try:
            directory, settings = self._settings()
        except AlignerError as error:
            self.name.error = str(error)
            return
        self.command.text = shlex.join(form.command_of(self.place.value, self.config.value, settings))
        self.name.props["hint"] = f"{directory}{' exists: it will be resumed' if is_run(directory) else ''}"
        await asyncio.sleep(PAUSE_SECONDS)
        if change != self.changes:
            return
        found: dict[str, Any] = {"plan": None, "no_plan": "", "yaml": "", "script": ""}
        try:
            found |= await self.studio.planner.ask("check", self.config.value, settings)
            if self.place.value == "slurm" and not found["refusal"]:
                found |= await self.studio.planner.ask("script", self.config.value, settings)
        except ServerError as error:
            found["refusal"] = str(error)
        if change == self.changes:
            self._show_checked(found)

    def _show_checked(self, found: dict[str, Any]) -> None:
        """Show a refusal beside the setting that it names, and the plan."""
        self.is_good, self.yaml.text, self.script.text = not found["refusal"], found["yaml"], found["script"]
        named = form.named_in(found["refusal"], self.keys)
        for name, field in self.fields.items():
            field.error = found["refusal"] if name == named else None
        self.plan.clear()
        with self.plan:
            if found["refusal"]:
                ui.label(f"Cannot start: {found['refusal']}").classes("text-negative").style("white-space: pre-wrap")
            if found["no_plan"] and found["no_plan"] != found["refusal"]:
                ui.label(f"No plan: {found['no_plan']}").style("white-space: pre-wrap")
            if found["plan"] is not None:
                _show_plan(found["plan"])

    async def _look(self) -> None:
        self.data.clear()
        try:
            with self.data:
                waiting = ui.label("reading ...").style("white-space: pre-wrap")
            found = await self.studio.reader.ask("preview", self.config.value, self._settings()[1])
        except AlignerError as error:
            waiting.text = str(error)
            return
        self.data.clear()
        with self.data:
            for one in found["sets"]:
                _show_set(one)

    async def _start(self) -> None:
        """Start it, and go to its page when it has begun; show what it said if it ended before."""
        if not self.is_good:
            self.said.text = "not started: the settings are not checked yet, or refused; see the plan"
            return
        self.button.disable()
        self.said.text = "starting ..."
        try:
            directory, settings = self._settings()
            process = form.start(self.place.value, self.config.value, settings, directory, read_only=self.studio.read_only)
            for _ in range(int(START_SECONDS)):
                await asyncio.sleep(1.0)
                if process.poll() is not None or (self.place.value == "local" and (directory / "run.json").is_file()):
                    break
            self.said.text = "\n".join(tail(directory / LAUNCH_LOG, 1 << 12)) if process.poll() else "started"
            if not process.poll():
                ui.navigate.to(f"/run/{quote(self.name.value)}")
        except (AlignerError, OSError) as error:
            self.said.text = f"not started: {error}"
        self.button.enable()


def _card(title: str) -> ui.card:
    with ui.card().classes("w-full gap-2").props("flat bordered") as card:
        ui.label(title).classes("text-subtitle1 text-weight-medium").props('role="heading" aria-level="2"')
    return card


def _copied(what: str) -> ui.label:
    """A text with a button that copies it."""
    with _card(f"{what[0].upper()}{what[1:]}"):
        text = ui.label().style(f"{MONO}; max-height: 20rem; overflow: auto").classes("w-full")
        text.props(f'tabindex="0" role="region" aria-label="{what}"')
        ui.button(f"Copy the {what}", on_click=lambda: ui.clipboard.write(text.text)).props("no-caps flat dense")
    return text


def _show_plan(plan: dict[str, Any]) -> None:
    for problem in plan["problems"]:
        ui.label(f"Does not fit: {problem}").classes("text-negative")
    if not plan["problems"]:
        ui.label("Fits").classes("text-positive text-weight-medium")
    for line in plan["lines"]:
        ui.label(line)
    for panel in plan["panels"]:
        chart(Panel(**panel))


def _show_set(one: dict[str, Any]) -> None:
    ui.label(one["findings"]).style(MONO)
    for sample in one["samples"]:
        for row in sample["rows"]:
            note = f" ({row['note']})" if row["note"] else ""
            ui.label(f"{sample['source']}{note}: {row['tokens']} tokens{row['seen']}").classes("text-caption text-weight-medium")
            with ui.element("div").style(MONO).classes("w-full"):
                for text, is_learnt in row["pieces"]:
                    style = "background: #bbf7d0; color: #052e16; text-decoration: underline" if is_learnt else ""
                    ui.label(text[:PIECE]).style(f"display: inline; white-space: pre-wrap; {style}").classes("" if is_learnt else "muted")
        for image in sample["images"]:
            ui.image(image).classes("w-32").props('alt="image of the sample"')
    ui.label("Green and underlined: tokens in the loss; grey: the prompt and what else is not trained.").classes("text-caption")
