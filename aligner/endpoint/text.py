"""Sampled tokens as what a client reads: text in whole characters, without stop strings, split into thinking, content and tool calls.

A response that streams and one that arrives as a whole take the same way, so both read the same.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.data.tokenizer import Tokenizer
from aligner.rollout.engine import GenResult

CONTENT, REASONING, CALL = "content", "reasoning", "call"
THINK, THOUGHT = "<think>", "</think>"
# How models begin and end tool calls: Qwen and Hermes, Mistral, Llama 3. An empty end: the end of the response.
_CALLS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "<|python_tag|>": ""}
_BEFORE = 8  # tokens in front of new ones that decide how these are spelled: spaces, characters of several tokens
_BROKEN = "\ufffd"  # a character whose last bytes are missing


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a response: `text` of thinking or content, or a tool call with its name and its arguments as JSON."""

    kind: str
    text: str = ""
    name: str = ""
    arguments: str = ""
    id: str = ""


class Decoder:
    """Token ids, piece by piece, as text: after `prompt`, and never half of a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []  # the latest, which decide how the next are spelled
        self._keep(list(prompt[-_BEFORE:]))
        if _BROKEN in self._text:  # it begins or ends within a character
            self._keep([])

    def feed(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that these ids add."""
        self._ids += ids
        whole = self._decoded(self._ids)
        if whole.endswith(_BROKEN) and not last:
            return ""
        if not whole.startswith(self._text):
            self._ids, self._text = self._ids[self._shown :], ""
            whole = self._decoded(self._ids)
        new = whole[len(self._text) :]
        if new and len(self._ids) > _BEFORE:  # the next ids need only these in front of them, which begin with a character
            self._keep(self._ids[self._shown :])
        else:
            self._text, self._shown = whole, len(self._ids)
        return new

    def _keep(self, ids: list[int]) -> None:
        self._ids, self._text, self._shown = ids, self._decoded(ids), len(ids)  # of `_ids`: the text, and how many it is of

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


@dataclass(kw_only=True, slots=True)
class Reply:
    """One response as it grows. `thinks`: it may begin with thinking; `has_tools`: it may call tools."""

    tokenizer: Tokenizer
    prompt: Sequence[int]
    stops: Sequence[str] = ()
    thinks: bool = False
    has_tools: bool = False
    skip_special: bool = True
    pieces: list[Piece] = field(default_factory=list)  # neighbours of a kind joined
    stopped: str = ""  # the stop string that was found
    num_tokens: int = 0
    _decoder: Decoder = field(init=False)
    _state: str = CONTENT  # or REASONING, or the mark that began a call
    _held: str = ""  # may turn out to be a stop string
    _rest: str = ""  # may turn out to be a mark
    _strips: bool = False  # white space behind a mark

    def __post_init__(self) -> None:
        self._decoder = Decoder(self.tokenizer, self.prompt, skip_special=self.skip_special)
        if self.thinks and self.tokenizer.decode(self.prompt[-_BEFORE:], skip_special=False).rstrip().endswith(THINK):
            self._state, self._strips = REASONING, True

    @property
    def has_called(self) -> bool:
        return any(piece.kind == CALL for piece in self.pieces)

    def finish_reason(self, result: GenResult) -> str:
        """OpenAI's: stop, length or tool_calls."""
        return "tool_calls" if self.has_called else "stop" if self.stopped else result.finish_reason.value

    def joined(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)

    def feed(self, ids: Sequence[int], *, last: bool = False) -> list[Piece]:
        """What these tokens add."""
        self.num_tokens += len(ids)
        if self.stopped and not last:
            return []
        text = "" if self.stopped else self._held + self._decoder.feed(ids, last=last)
        ends = ((place + len(stop), place, stop) for stop in self.stops if (place := text.find(stop)) >= 0)
        if (found := min(ends, default=None)) is not None:  # the first to be complete, at which the engine ended
            text, self.stopped, self._held = text[: found[1]], found[2], ""
        elif not self.stopped:
            keep = 0 if last else _overlap(text, self.stops)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        new = [piece for piece in self._split(text, last=last) if piece.text or piece.kind == CALL]
        for piece in new:
            if self.pieces and piece.kind == self.pieces[-1].kind != CALL:
                self.pieces[-1] = Piece(piece.kind, self.pieces[-1].text + piece.text)
            else:
                self.pieces.append(piece)
        return new

    def close(self, result: GenResult) -> list[Piece]:
        """What the tokens add that were not fed yet, and what was held back."""
        return self.feed(result.tokens[self.num_tokens :], last=True)

    def _split(self, text: str, *, last: bool) -> Iterator[Piece]:
        if not self.thinks and not self.has_tools:
            yield Piece(CONTENT, text)
            return
        self._rest += text
        while True:
            if self._strips:
                self._rest = self._rest.lstrip()
                self._strips = not self._rest
            marks = self._marks()
            found = min(((place, mark) for mark in marks if (place := self._rest.find(mark)) >= 0), default=None)
            if found is None:
                break
            said, mark = self._rest[: found[0]], found[1]
            self._rest = self._rest[found[0] + len(mark) :]
            yield from self._ended(said, mark)
        if last:
            said, self._rest = self._rest, ""
            yield from self._ended(said, "")
        elif self._state in (CONTENT, REASONING):
            said = self._rest[: len(self._rest) - _overlap(self._rest, marks)].rstrip()
            self._rest = self._rest[len(said) :]
            yield Piece(self._state, said)

    def _marks(self) -> list[str]:
        """The marks that end the present state."""
        if self._state == REASONING:
            return [THOUGHT]
        if self._state != CONTENT:
            return [close] if (close := _CALLS[self._state]) else []
        is_first = self.thinks and not self.pieces and THINK.startswith(self._rest.lstrip()[: len(THINK)])
        return [*([THINK] if is_first else []), *(_CALLS if self.has_tools else [])]

    def _ended(self, said: str, mark: str) -> Iterator[Piece]:
        """What was said up to a mark, or to the end."""
        if self._state in (CONTENT, REASONING):
            yield Piece(self._state, said.rstrip() if mark else said)
            self._state = {THINK: REASONING, THOUGHT: CONTENT}.get(mark, mark or self._state)
            self._strips = self._state in (CONTENT, REASONING)
            return
        calls = _calls(said)
        yield from calls or [Piece(CONTENT, f"{self._state}{said}{mark}")]  # not readable as one: the client sees what was written
        self._state, self._strips = CONTENT, bool(calls)


def _overlap(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that one of the marks begins with."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def _calls(text: str) -> list[Piece]:
    """The tool calls in the text of one mark: a JSON object, a list of them, or several with semicolons; none if it is something else."""
    found: list[Any] = []
    text = text.strip()
    try:
        while text:
            value, end = json.JSONDecoder().raw_decode(text)
            found += value if isinstance(value, list) else [value]
            text = text[end:].lstrip("; \n")
    except (ValueError, RecursionError):
        return []
    calls = []
    for one in found:
        arguments = one.get("arguments", one.get("parameters", {})) if isinstance(one, dict) else None
        if not isinstance(arguments, dict) or not isinstance(one.get("name"), str):
            return []
        calls.append(Piece(CALL, "", one["name"], json.dumps(arguments, ensure_ascii=False), f"call_{secrets.token_hex(12)}"))
    return calls
