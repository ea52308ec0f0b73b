"""Turns of a conversation in OpenAI's format: `{role, content}`, thinking, tool calls, and the tools that a model may call.

A null field counts as absent (in Arrow columns, every field that only other turns have is null).
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.data.sources import Struct
from aligner.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")  # categories of Unicode
_FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufe0e\ufe0f"  # invisible characters of other categories
MAX_SHOWN = 80  # characters of a bad value that are quoted in a message

Tools = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a turn, by its digest in the store; without one: the image `index` of the record's own field, or its next one."""

    digest: str = ""
    index: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation. `thinking` and `tool_calls` belong to an assistant, `name` and `tool_call_id` to a tool.

    `parts`: of a turn with images, them and the texts between, which make up the `content`.
    """

    role: str
    content: str
    parts: tuple[str | Image, ...] = ()
    thinking: str = ""
    tool_calls: Tools = ()
    name: str = ""
    tool_call_id: str = ""

    def as_json(self, thought: str = THOUGHTS[0], parts: bool = False) -> dict[str, Any]:
        """The turn for chat templates, without empty fields; thinking in the field `thought`, the content optionally as `parts`."""
        more = {
            thought: self.thinking,
            "tool_calls": list(self.tool_calls),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        content: Any = [{"type": "text", "text": self.content}] if parts else self.content
        if self.parts:
            content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts]
        return {"role": self.role, "content": content} | {name: value for name, value in more.items() if value}

    @property
    def texts(self) -> tuple[str, ...]:
        """The content, where a template may write images between its texts."""
        return tuple(part for part in self.parts if isinstance(part, str)) if self.parts else (self.content,)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))

    def with_parts(self, parts: Sequence[str | Image]) -> Message:
        """The same turn with these images and texts."""
        return replace(self, content="".join(part for part in parts if isinstance(part, str)), parts=tuple(part for part in parts if part))

    @property
    def is_plain(self) -> bool:
        """Whether it is only an assistant's text."""
        return self.role == "assistant" and not self.thinking and not self.tool_calls

    def without_thinking(self) -> Message:
        """The same turn without an assistant's thinking. Raises DataError if nothing else is in it."""
        end = _end_of_thoughts(self.content) if self.role == "assistant" else 0
        content = _THOUGHT.sub("", self.content[:end]) + self.content[end:]
        if self.content and is_blank(content) and not self.tool_calls:
            raise DataError(f"an assistant's message is {shown(self.content)}, expected something besides thinking (data.thinking=drop)")
        return replace(self, content=content, thinking="")

    def with_thinking_in_text(self) -> Message:
        """The same turn with its thinking between marks in its text, for templates without another place for it."""
        return replace(self, content=f"<think>\n{self.thinking}\n</think>\n\n{self.content}", thinking="") if self.thinking else self

    def thoughts(self) -> list[str]:
        """An assistant's thinking, wherever it is."""
        found = [self.thinking, *_THOUGHT.findall(self.content[: _end_of_thoughts(self.content)])] if self.role == "assistant" else []
        return [thought.strip() for thought in found if thought.strip()]


def _end_of_thoughts(text: str) -> int:
    """The position after the last `</think>` and white space: a `<think>` after it has no end, and is not searched for one."""
    _, mark, behind = text.rpartition("</think>")
    return len(text) - len(behind.lstrip()) if mark else 0


Conversation = tuple[Message, ...]


def shown(value: object) -> str:
    """A value as quoted in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def is_blank(text: str) -> bool:
    """Whether nothing of a text is visible: only white space, control and format characters (U+200B, U+FEFF, ...)."""
    return all(unicodedata.category(one) in _UNSEEN or one in _FILLERS for one in text)


def number_of(value: object, what: str, expected: str = "a finite number") -> float:
    """A number of a record."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{what} is {shown(value)}, expected {expected}")
    return float(value)


def text_of(value: object, what: str, *, empty: bool = False) -> str:
    """A string that can be tokenized; JSON can contain half a surrogate pair, which is not text."""
    if not isinstance(value, str) or not (value or empty):
        raise DataError(f"{what} is {shown(value)}, expected a {'' if empty else 'non-empty '}string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is {shown(value)}, expected text without lone surrogates") from error
    return value


def parse_messages(turns: object, name: str) -> Conversation:
    """The conversation in a field `name`. Raises DataError for an unknown role, an empty turn, or two assistant turns in a row."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"field {name!r} is {shown(turns)}, expected a non-empty list of {{role, content}}")
    found = tuple(_message(turn, f"field '{name}[{position}]'") for position, turn in enumerate(turns))
    for position, (before, message) in enumerate(zip(found[:-1], found[1:], strict=True), start=1):
        if before.role == message.role == "assistant":
            raise DataError(f"field '{name}[{position}]': role is 'assistant', like the message before, expected another speaker")
    return found


def parse_tools(value: object) -> Tools:
    """The tools in a field `tools`: a list of JSON schemas, bare or as `{type: function, function}`, or the same list as JSON text."""
    found = _decoded(value, "field 'tools'", "a list of {type: function, function: {name, description, parameters}}")
    if not isinstance(found, list):
        raise DataError(f"field 'tools' is {shown(value)}, expected a list of {{type: function, function: {{name, ...}}}}")
    tools = []
    for position, tool in enumerate(found):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"field 'tools[{position}]' is {shown(tool)}, expected {{type: function, function: {{name, ...}}}}")
        tools.append({"type": "function", "function": _without_nulls(function)})
    return tuple(tools)


def _message(turn: object, what: str) -> Message:
    if not isinstance(turn, dict) or "role" not in turn or not ("content" in turn or dict.get(turn, "tool_calls")):
        raise DataError(f"{what} is {shown(turn)}, expected {{role, content}}")
    role = _SAME_ROLES.get(turn["role"], turn["role"]) if isinstance(turn["role"], str) else turn["role"]
    if role not in ROLES:
        raise DataError(f"{what}: role is {shown(turn['role'])}, allowed: {', '.join(ROLES)}")
    if role == "assistant":
        return _assistant(turn, what)
    parts = _parts(turn, what)
    content = text_of(_content(turn), f"{what}: content", empty=role in ("system", "tool") or bool(parts))
    if role != "tool":
        return Message(role=role, content=content, parts=parts)
    return Message(role=role, content=content, parts=parts, name=turn.get("name") or "", tool_call_id=turn.get("tool_call_id") or "")


def _assistant(turn: dict[str, Any], what: str) -> Message:
    calls = _calls(turn, what) if dict.get(turn, "tool_calls") else ()
    if _parts(turn, what):
        raise DataError(f"{what} is an assistant's and holds an image, expected images only in prompts: no model here answers with one")
    content = _content(turn)
    content = text_of("" if content is None and calls else content, f"{what}: content", empty=bool(calls))
    if is_blank(content) and not calls:
        raise DataError(f"{what}: content is {shown(content)}, expected a response, not only white space")
    thinking = next((turn[name] for name in THOUGHTS if isinstance(dict.get(turn, name), str)), "")
    return Message(role="assistant", content=content, thinking=text_of(thinking, f"{what}: thinking", empty=True), tool_calls=calls)


def _content(turn: dict[str, Any]) -> object:
    """A text, which OpenAI also writes in parts, `[{type: text, text}]`."""
    content = turn.get("content")
    if isinstance(content, list) and content and all(isinstance(part, Image) or _is_text(part) for part in content):
        texts = [part["text"] if "text" in part else None for part in content if not isinstance(part, Image)]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else content
    return content


def _parts(turn: dict[str, Any], what: str) -> tuple[str | Image, ...]:
    """The texts and images of a turn that has images; the texts are checked with the content."""
    content = turn.get("content")
    if not isinstance(content, list):
        return ()
    if (kind := next((part["type"] for part in content if is_media(part)), None)) is not None:
        raise DataError(f"{what}: a part of the content has the type {kind!r}, expected text: this model, as it is loaded, does not see")
    if not any(isinstance(part, Image) for part in content):
        return ()
    found = (part if isinstance(part, Image) else dict.get(part, "text") if isinstance(part, dict) else None for part in content)
    return tuple(part for part in found if isinstance(part, Image) or (isinstance(part, str) and part))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def is_media(part: object) -> bool:
    """Whether a part of a content is an image (a video, ...) as records name it; it does not count as read."""
    kind = dict.get(part, "type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind.startswith(("image", "video", "audio", "input_image", "input_video", "input_audio"))


def _calls(turn: dict[str, Any], what: str) -> Tools:
    """Tool calls; their arguments are objects, which templates write as JSON themselves."""
    calls = turn["tool_calls"]
    if not isinstance(calls, list):
        raise DataError(f"{what}: tool_calls is {shown(calls)}, expected a list of {{function: {{name, arguments}}}}")
    return tuple(_call(call, f"{what}: tool_calls[{position}]") for position, call in enumerate(calls))


def _call(call: object, what: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{what} is {shown(call)}, expected {{function: {{name, arguments}}}}")
    arguments = _decoded(function.get("arguments") or {}, f"{what}: arguments", "a JSON object")
    if not isinstance(arguments, dict):
        raise DataError(f"{what}: arguments is {shown(arguments)}, expected a JSON object")
    made = {"type": "function", "function": {"name": function["name"], "arguments": _without_nulls(arguments)}}
    call.get("type")  # the only type; counts as read
    return made | ({"id": call["id"]} if dict.get(call, "id") else {})


def _decoded(value: object, what: str, expected: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{what} is {shown(value)}, expected {expected}, or that as JSON text") from error


def _without_nulls(value: Any) -> Any:
    """The value without the nulls that Arrow added; an author's own nulls stay. Every field counts as read."""
    if isinstance(value, dict):
        return {name: _without_nulls(value[name]) for name in value if not isinstance(value, Struct) or dict.get(value, name) is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def turns_of(said: str | Conversation, role: str) -> Conversation:
    """A text as one turn of that role; a conversation unchanged."""
    return (Message(role=role, content=said),) if isinstance(said, str) else said
