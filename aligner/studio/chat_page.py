"""A chat with one policy, or with two side by side, whose better answers become preference data."""

from __future__ import annotations

import asyncio
from typing import Any

from nicegui import ui

from aligner.errors import ServerError
from aligner.studio.new_page import MODELS, suggest
from aligner.studio.served import Models, preference, record
from aligner.studio.shared import Studio, outlined, show_page

TEXT = "white-space: pre-wrap; overflow-wrap: anywhere"
NAMES = ("A", "B")


def register(studio: Studio) -> None:
    served = Models()

    @ui.page("/chat")
    def chat() -> None:
        async def build() -> None:
            await suggest(studio)
            Chat(studio, served).show()

        show_page("Chat", build)


class Chat:
    """One tab's conversation, which is lost with the tab; the preferences are in the folder's file."""

    def __init__(self, studio: Studio, served: Models) -> None:
        self.studio, self.served = studio, served
        self.turns: list[dict[str, str]] = []
        self.answers: list[str] = []  # of both to the newest message, until one is chosen
        self.is_chat, self.is_stopped = True, False

    def show(self) -> None:
        hints = ("an export or a checkpoint of a run, a model's directory, or ORG/NAME of the Hub", "to compare with; may be empty")
        with ui.row().classes("w-full gap-3"):
            self.models = [outlined(ui.input(f"Policy {name}"), "flex: 1 1 24rem", hint) for name, hint in zip(NAMES, hints, strict=True)]
            for field in self.models:
                field.props(f'list="{MODELS}"')
        with ui.row().classes("w-full gap-3"):
            self.system = outlined(ui.input("System prompt", value=""), "flex: 3 1 20rem")
            self.temperature = outlined(ui.number("Temperature", value=1.0, min=0, max=2, step=0.1), "flex: 1 1 6rem")
            self.max_tokens = outlined(ui.number("Most tokens", value=256, min=1, precision=0), "flex: 1 1 6rem")
            self.seed = outlined(ui.number("Seed", value=0, min=0, precision=0), "flex: 1 1 6rem")
        self.talk = ui.column().classes("w-full gap-2").props('role="log" aria-label="Conversation" aria-live="polite"')
        self.choice = ui.row().classes("gap-3")
        with self.choice:
            for number, name in enumerate(NAMES):
                ui.button(f"{name} is better", on_click=lambda number=number: self._prefer(number)).props("no-caps outline")
        self.choice.set_visibility(False)
        self.said = ui.label().style(TEXT).props('role="status"')
        self.message = outlined(ui.textarea("Message", value=""), "width: 100%", "Ctrl+Enter sends").props("autogrow")
        self.message.on("keydown.ctrl.enter", self._send)
        with ui.row().classes("gap-3"):
            self.button = ui.button("Send", on_click=self._send).props("no-caps")
            ui.button("Stop", on_click=self._stop).props("no-caps outline")
            ui.button("New conversation", on_click=self._forget).props("no-caps outline")

    def _stop(self) -> None:
        self.is_stopped = True

    def _forget(self) -> None:
        self.turns, self.answers = [], []
        self.talk.clear()
        self.choice.set_visibility(False)

    async def _send(self) -> None:
        said, models = self.message.value, [field.value.strip() for field in self.models if (field.value or "").strip()]
        if not self.button.enabled or not said or not models:
            self.said.text = self.said.text if not self.button.enabled else "choose a policy, and write a message"
            return
        self.button.disable()
        self._continue(0)
        self.is_stopped, self.message.value = False, ""
        self.turns.append({"role": "user", "content": said})
        with self.talk:
            _turn("you", said)
            with ui.row().classes("w-full gap-3 no-wrap items-start"):
                places = [_turn(f"{name}: {model}", "...") for name, model in zip(NAMES, models, strict=False)]
        found = await asyncio.gather(*(self._answer(number, models, place) for number, place in enumerate(places)))
        self.answers = [one for one in found if one]
        if not self.answers:  # the message can be sent again
            self.turns.pop()
            self.message.value = said
        self.choice.set_visibility(len(self.answers) == len(NAMES))
        self.button.enable()

    async def _answer(self, number: int, models: list[str], place: ui.label) -> str:
        """The answer, shown as it comes; nothing after a failure, which is shown in its place."""
        how: dict[str, Any] = {"temperature": self.temperature.value or 0.0, "max_tokens": int(self.max_tokens.value or 1)}
        how["seed"] = int(self.seed.value or 0) + number * (len({*models}) < len(models))  # one policy twice: two samples
        try:
            self.said.text = "a policy that is not served yet is loaded first ..."
            served = await self.served.get(models[number])
            self.is_chat = served.is_chatting
            self.said.text = "" if self.is_chat else f"{models[number]} has no chat template: it continues the text"
            place.text = ""
            async for piece in self.served.answer(served, self._asked(), how):
                place.text += piece
                if self.is_stopped:
                    break
        except ServerError as error:
            self.said.text, place.text = "", f"error: {error}"
            return ""
        return str(place.text)

    def _asked(self) -> list[dict[str, str]]:
        system = self.system.value.strip() if self.is_chat else ""
        return [*([{"role": "system", "content": system}] if system else []), *self.turns]

    def _prefer(self, better: int) -> None:
        """Append the pair to the file, and continue with the better answer."""
        try:
            pair = preference(self._asked(), self.answers[better], self.answers[1 - better], is_chat=self.is_chat)
            path = record(self.studio.runs.folder, pair, read_only=self.studio.read_only)
            self.said.text = f"appended to {path}: aligner train dpo data.train={path}"
        except (ServerError, OSError) as error:
            self.said.text = f"continues with {NAMES[better]}; not written: {error}"
        self._continue(better)

    def _continue(self, number: int) -> None:
        """Take an answer into the conversation."""
        if self.answers:
            self.turns.append({"role": "assistant", "content": self.answers[number]})
        self.answers = []
        self.choice.set_visibility(False)


def _turn(who: str, text: str) -> ui.label:
    with ui.card().classes("gap-1 w-full").style("flex: 1 1 0; min-width: 0").props("flat bordered"):
        ui.label(who).classes("text-caption muted").style("overflow-wrap: anywhere")
        return ui.label(text).style(TEXT)
