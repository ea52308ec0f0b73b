"""Special tokens around texts and in them: those that frame turns are the template's to write, not a message's."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aligner.data.rendering import PROBES, Rendered, render
from aligner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTED: ContextVar[Counter[str] | None] = ContextVar("NOTED", default=None)  # frames that were found in the texts of a record
_MARK = secrets.token_hex(6)  # no text from outside has it
_ESCAPED = re.compile(f"x{_MARK}x([0-9]+)x")  # a frame that is to stay text, by its id
_FRAME = f"z{_MARK}z"  # before and behind the id of one that is a token, for the tokenizer that knows frames by no other name
# The content of a turn: reasoning, answers, calls of tools, the slots of images.
_CONTENT = re.compile(
    r"think|thought|reason|answer|python_tag|function|imag|img|vid|audio|vision|<\|channel>|<channel\|>"
    r"|tool[ _\u2581-]?(call|use|response|output|sep)",
    re.IGNORECASE,
)


class Framing:
    """What frames texts for a tokenizer: `templates` by name, the usual one first, none for plain text; `end_ids` end a response."""

    def __init__(self, backend: PreTrainedTokenizerBase, templates: Mapping[str, str], day: date, end_ids: Sequence[int]) -> None:
        self._backend = backend
        self._end_ids = end_ids
        self._templates = templates
        self._day = day
        self._beginnings = tuple({content[:3] for content in self._added})

    @cached_property
    def _added(self) -> dict[str, int]:
        """Longest first: one may be a part of another."""
        added = ((token.content, number) for number, token in self._backend.added_tokens_decoder.items() if token.content.strip())
        return dict(sorted(added, key=lambda entry: (-len(entry[0]), entry[1])))

    @cached_property
    def frames(self) -> dict[str, int]:
        """The special tokens that frame texts, with their ids: begin, end, padding, and what the chat template writes around turns.

        Not those for content, such as `<think>`, `<tool_call>` and the slots of images.
        """
        backend = self._backend
        ends = {backend.bos_token_id, backend.pad_token_id, *self._end_ids}
        found = [rendered.text for messages in PROBES if (rendered := self._probe(messages))]
        written = "\n".join([*self._templates.values(), *found])

        def is_mark(text: str) -> bool:  # not a word that somebody added to the vocabulary, such as `user`
            return not text.strip()[0].isalnum() and text in written and not _CONTENT.search(text)

        return {text: number for text, number in self._added.items() if number in ends or is_mark(text)}

    @cached_property
    def ids(self) -> frozenset[int]:
        """Of the frames."""
        return frozenset(self.frames.values())

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """The tokens by which the chat template ends an assistant's turn: the last one, and one that others follow."""
        said = f"w{_MARK}w"
        said_by = (("user", "a"), ("assistant", said), ("user", "b"))
        turns = [{"role": role, "content": [{"type": "text", "text": text}] if self.wants_parts else text} for role, text in said_by]
        found = {self._backend.eos_token_id}
        for messages in (turns[:2], turns):
            if (rendered := self._probe(messages)) and said in rendered.text:
                behind = self._backend(rendered.text.rpartition(said)[2], add_special_tokens=False, verbose=False)["input_ids"]
                found |= set([token for token in behind if token in self.ids][:1])
        return frozenset(found)

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> Rendered | None:
        """A conversation as the template writes it; None if it has no place for one."""
        with suppress(DataError):
            if self._templates:
                return self.render(next(iter(self._templates.values())), messages, asks=messages[-1]["role"] != "assistant")
        return None

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), asks: bool = False) -> Rendered:
        """A conversation as one of the templates writes it; `asks`: with its generation prompt. Raises as `rendering.render` does."""
        variables = {**self._backend.special_tokens_map, "tools": list(tools) or None, "documents": None, "add_generation_prompt": asks}
        try:
            return render(template, messages, day=self._day, **variables)
        except (ConfigError, DataError) as error:
            named = f"the chat template of {self._backend.name_or_path}"
            raise type(error)(str(error).replace("the chat template", named, 1)) from error

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template has a place for contents as a list of parts alone, as those of models with images may."""
        said = f"w{_MARK}w"
        asked = [[{"role": "user", "content": content}] for content in (said, [{"type": "text", "text": said}])]
        texts = [rendered.text if (rendered := self._probe(messages)) else "" for messages in asked]
        return said not in texts[0] and said in texts[1]

    def found(self, text: str) -> list[str]:
        """The frames that are written out in a text; they are noted in `NOTED`."""
        if not any(beginning in text for beginning in self._beginnings):  # before a template is looked at
            return []
        found = [frame for frame in self.frames if frame in text]
        if found and (noted := NOTED.get()) is not None:
            noted.update(found)
        return found

    def begins(self, text: str) -> bool:
        """Whether a text begins with a frame."""
        text = text.lstrip()
        return text.startswith(self._beginnings) and text.startswith(tuple(self.frames))

    def escaped(self, text: str, frames: Iterable[str]) -> str:
        """The text with these frames marked as text, for `encode`."""
        for frame in frames:
            text = text.replace(frame, f"x{_MARK}x{self.frames[frame]}x")
        return text

    def encode(self, rendered: Rendered) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it stands in `rendered.written`; a token that does so in part counts.

        Raises DataError if a frame cannot be written as plain text with this tokenizer.
        """
        text, written = rendered.text, rendered.written if self._backend.is_fast else ()
        to_token: Callable[[int], int | None]
        if _ESCAPED.search(text):
            text, written = self._unescaped(rendered)
            encoding = self._plain.encode(text, add_special_tokens=False)
            ids, to_token = [self._known.get(number, number) for number in encoding.ids], encoding.char_to_token
            if sum(number in self.ids for number in ids) != text.count(_FRAME) // 2:
                raise DataError("this tokenizer cannot read a special token in a text as plain text, allowed: data.special_text=keep")
        else:
            found = self._backend(text, add_special_tokens=False, verbose=False)
            ids, to_token = list(found["input_ids"]), found.char_to_token
        mask = [False] * len(ids)
        for start, stop in written:
            first, last = next((at for at in map(to_token, range(start, stop)) if at is not None), None), to_token(stop - 1)
            if first is not None:
                end = len(ids) if last is None else last + 1
                mask[first:end] = [True] * (end - first)
        return ids, mask

    def _unescaped(self, rendered: Rendered) -> tuple[str, list[tuple[int, int]]]:
        """With frames by the names that `_plain` has for them, and what was marked as text as it was."""
        borders = [0, *(border for span in rendered.written for border in span), len(rendered.text)]
        names, pieces = {str(number): text for text, number in self.frames.items()}, []
        for start, stop in zip(borders[:-1], borders[1:], strict=True):
            piece = rendered.text[start:stop]
            for frame, number in self.frames.items():
                piece = piece.replace(frame, f"{_FRAME}{number}{_FRAME}")
            pieces.append(_ESCAPED.sub(lambda found: names[found[1]], piece))
        places = [0]
        for piece in pieces:
            places.append(places[-1] + len(piece))
        return "".join(pieces), list(zip(places[1:-1:2], places[2:-1:2], strict=True))

    @cached_property
    def _plain(self) -> Any:
        """A tokenizer that knows no frame by its own name. Raises DataError for one that is not of `tokenizers`."""
        from tokenizers import Tokenizer

        if not self._backend.is_fast:
            raise DataError("a text holds special tokens, which this tokenizer (without tokenizer.json) cannot read as plain text")
        state = json.loads(self._backend.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            if token["content"] in self.frames:
                token["content"] = f"{_FRAME}{self.frames[token['content']]}{_FRAME}"
                token["normalized"] = False
        return Tokenizer.from_str(json.dumps(state))

    @cached_property
    def _known(self) -> dict[int, int]:
        """Ids of `_plain` -> the tokenizer's, of all that was added to its vocabulary."""
        names = {text: f"{_FRAME}{number}{_FRAME}" if text in self.frames else text for text, number in self._added.items()}
        return {self._plain.token_to_id(name): self._added[text] for text, name in names.items()}
