"""Renders chat templates, and tells the special tokens that frame turns apart from text: only a template may write frames.

A template is a program that comes with a model, so its resources are limited. Before its first record a few conversations are rendered in a
separate process with limits on memory and time, which stops templates that could never work (`{{ 'x' * 10**10 }}`, endless loops). After
that, records are rendered here, with a time limit. The language is that of `transformers`: its sandbox, filters and functions,
`{% generation %}`, `{% break %}`."""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime, time as midnight
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.errors import ConfigError, DataError

MOST_SECONDS = 10.0  # for one conversation, and for all trial conversations
MOST_BYTES = 2**30  # of the trial process
MOST_CHARACTERS = 2**26  # of a rendered conversation, and of the results of `*`
_MARK = secrets.token_hex(6)  # occurs in no text from outside
_OPEN, _CLOSE = f"<{_MARK}(", f"<{_MARK})"  # around an assistant's text
PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [{"role": role, "content": "Hello"} for role in ("user", "assistant") * 2],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "Hello"},
    ],
)
PROBE_TOOLS = [{"type": "function", "function": {"name": "f", "description": "Hello", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, and the [start, stop) of its characters in `{% generation %}`."""

    text: str
    written: tuple[tuple[int, int], ...]

    def replaced(self, spans: Sequence[tuple[int, int]], texts: Sequence[str]) -> Rendered:
        """With these texts in place of the spans, which are in order."""
        pieces, ends, last = list[str](), [0], 0
        for (start, stop), text in zip(spans, texts, strict=True):
            pieces += [self.text[last:start], text]
            ends.append(ends[-1] + len(text) - (stop - start))
            last = stop

        def moved(place: int) -> int:
            return place + ends[bisect_right(spans, place, key=lambda span: span[1])]

        return Rendered("".join([*pieces, self.text[last:]]), tuple((moved(start), moved(stop)) for start, stop in self.written))


def writes_dates(template: str) -> bool:
    """Whether the text depends on the date."""
    return "strftime_now" in template


def render(template: str, messages: Sequence[Mapping[str, Any]], *, day: date, **variables: Any) -> Rendered:
    """Render a conversation. `variables`: `tools`, `add_generation_prompt`, `bos_token` and the like; `day`: today for the template.

    Raises: DataError with the template's message, whatever its exception; ConfigError for a template that exceeds the limits or is not
    valid Jinja.
    """
    _try_out(template)
    return _render(template, messages, day, variables)


def _render(template: str, messages: Sequence[Mapping[str, Any]], day: date, variables: Mapping[str, Any]) -> Rendered:
    now = datetime.combine(day, midnight())
    clock = _Clock()
    try:
        text = _compiled(template).render(messages=messages, strftime_now=now.strftime, tick_=clock.tick, **variables)
    except Exception as error:  # a program from outside may raise anything
        raise DataError(f"the chat template refuses the messages: {_told(error)}") from error
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"the chat template makes {len(text)} characters of the messages, allowed: at most {MOST_CHARACTERS}")
    pieces, written, start = text.split(f"<{_MARK}"), [], 0
    kept = [pieces[0], *(piece[1:] for piece in pieces[1:])]
    place = len(kept[0])
    for piece in pieces[1:]:
        if piece[0] == "(":
            start = place
        else:
            written.append((start, place))
        place += len(piece) - 1
    return Rendered("".join(kept), tuple(written))


def _told(error: BaseException) -> str:
    message = str(error)
    return message if isinstance(error, (TemplateError, DataError)) and message else f"{type(error).__name__}: {message}".rstrip(": ")


class _Clock:
    """Stops a template whose loops take too long; called in every iteration of every loop and in every macro."""

    def __init__(self) -> None:
        self._ticks, self._end = 0, time.monotonic() + MOST_SECONDS

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % 256 == 0 and time.monotonic() > self._end:
            raise TimeoutError(f"it takes longer than {MOST_SECONDS:.0f} seconds")


class _Generation(Extension):
    """`{% generation %}` around an assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of `transformers`, without randomness: `random` and `lipsum` would produce other tokens each time."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _as_json
        self.globals["raise_exception"] = _refuse
        del self.filters["random"], self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and whole and left.bit_length() * right > 4096:
            raise OverflowError(f"{left} ** {right} is too large")
        if operator == "*" and not whole:
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__") and len(sequence) * times > MOST_CHARACTERS:
                    raise MemoryError(f"a text or list of {len(sequence)} is repeated {times} times")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro)):
            node.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name("tick_", "load"), [], [], None, None)).set_lineno(node.lineno))
        return tree.set_environment(self)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    try:
        return _Environment().from_string(template)
    except TemplateError as error:
        raise ConfigError(f"the chat template is not valid Jinja: line {getattr(error, 'lineno', '?')}: {error}") from error
    except RecursionError as error:
        raise ConfigError("the chat template is nested too deeply") from error


@cache
def _try_out(template: str) -> None:
    """Raise ConfigError if the template exceeds the limits of time or memory. Its other exceptions are reported with records."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", f"from {__name__} import _try_here; _try_here()"]
    _compiled(template)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(template).encode(),
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=6 * MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the chat template takes more than {6 * MOST_SECONDS:.0f} seconds for a conversation of a few words") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(
            f"the chat template takes more than {MOST_BYTES >> 20} MiB or {MOST_SECONDS:.0f} seconds for a conversation of a few words"
            f" ({lines[-1] if lines else 'it does not end'})"
        )


def _try_here() -> None:
    """The program of the trial process: exits with an error if a limit is reached."""
    template = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(MOST_SECONDS), int(MOST_SECONDS) + 1))
    marks = {"bos_token": "", "eos_token": ""}
    for messages in PROBES:
        for tools in ([], PROBE_TOOLS):
            try:
                _render(template, messages, date(2025, 1, 1), {"tools": tools, "add_generation_prompt": not tools, **marks})
            except DataError as error:
                if isinstance(error.__cause__, (MemoryError, TimeoutError, type(None))):
                    sys.exit(_told(error.__cause__ or error))


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aligner.data.vision import Vision

NOTED: ContextVar[Counter[str] | None] = ContextVar("NOTED", default=None)  # frames found in the texts of a record
_ESCAPED = re.compile(f"x{_MARK}x([0-9]+)x")  # a frame that stays text, by its id
_FRAME = f"z{_MARK}z"  # around the id of a frame that is a token, for the tokenizer that knows frames by no other name
# Tokens of a turn's content: reasoning, answers, tool calls, slots for images.
_CONTENT = re.compile(
    r"think|thought|reason|answer|python_tag|function|imag|img|vid|audio|vision|<\|channel>|<channel\|>"
    r"|tool[ _\u2581-]?(call|use|response|output|sep)",
    re.IGNORECASE,
)
_IMAGE_MARK = re.compile(r"imag|img|vid|vision|<row_\d+_col_\d+>", re.IGNORECASE)


class Framing:
    """How texts are framed for a tokenizer: `templates` by name, the default first, none for plain text; `end_ids` end a response.

    `vision`: of a model that sees; the tokens of images then frame texts too.
    """

    def __init__(
        self,
        backend: PreTrainedTokenizerBase,
        templates: Mapping[str, str],
        day: date,
        end_ids: Sequence[int],
        vision: Vision | None = None,
    ) -> None:
        self._backend = backend
        self._vision = vision
        self._end_ids = end_ids
        self._templates = templates
        self._day = day
        self._beginnings = tuple({content[:3] for content in self._added})

    @cached_property
    def _added(self) -> dict[str, int]:
        """Added tokens, longest first: one may be a part of another."""
        added = ((token.content, number) for number, token in self._backend.added_tokens_decoder.items() if token.content.strip())
        return dict(sorted(added, key=lambda entry: (-len(entry[0]), entry[1])))

    @cached_property
    def frames(self) -> dict[str, int]:
        """The special tokens that frame texts, with their ids: begin, end, padding, and the chat template's marks around turns.

        Tokens for content, such as `<think>` and `<tool_call>`, are not frames; those of images are, for a model that sees.
        """
        backend = self._backend
        ends = {backend.bos_token_id, backend.pad_token_id, *self._end_ids}
        found = [rendered.text for messages in PROBES if (rendered := self._probe(messages))]
        written = "\n".join([*self._templates.values(), *found])

        def is_mark(text: str) -> bool:  # not a word that was added to the vocabulary, such as `user`
            return not text.strip()[0].isalnum() and text in written and not _CONTENT.search(text)

        return {text: number for text, number in self._added.items() if number in ends or is_mark(text) or text in self.slots}

    @cached_property
    def slots(self) -> frozenset[str]:
        """The tokens that stand for images, and the marks around them; none for a model that does not see."""
        if self._vision is None:
            return frozenset()
        own = () if self._vision.failure else self._vision.slot_ids
        return frozenset(text for text, number in self._added.items() if number in own or _IMAGE_MARK.search(text))

    @cached_property
    def ids(self) -> frozenset[int]:
        return frozenset(self.frames.values())

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """The tokens that end an assistant's turn in the chat template: the last turn, and one that others follow."""
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
        """A conversation written by the template; None if the template cannot write it."""
        with suppress(DataError):
            if self._templates:
                return self.render(next(iter(self._templates.values())), messages, asks=messages[-1]["role"] != "assistant")
        return None

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), asks: bool = False) -> Rendered:
        """A conversation written by one of the templates; `asks`: with its generation prompt. Raises as `render` does."""
        variables = {**self._backend.special_tokens_map, "tools": list(tools) or None, "documents": None, "add_generation_prompt": asks}
        try:
            return render(template, messages, day=self._day, **variables)
        except (ConfigError, DataError) as error:
            named = f"the chat template of {self._backend.name_or_path}"
            raise type(error)(str(error).replace("the chat template", named, 1)) from error

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template only accepts contents as a list of parts, like some templates of models with images."""
        said = f"w{_MARK}w"
        asked = [[{"role": "user", "content": content}] for content in (said, [{"type": "text", "text": said}])]
        texts = [rendered.text if (rendered := self._probe(messages)) else "" for messages in asked]
        return said not in texts[0] and said in texts[1]

    def found(self, text: str) -> list[str]:
        """The frames that are spelled out in a text; they are added to `NOTED`."""
        if not any(beginning in text for beginning in self._beginnings):  # cheap, and needs no template
            return []
        found = [frame for frame in self.frames if frame in text]
        if found and (noted := NOTED.get()) is not None:
            noted.update(found)
        return found

    def begins(self, text: str) -> bool:
        text = text.lstrip()
        return text.startswith(self._beginnings) and text.startswith(tuple(self.frames.keys() - self.slots))

    def escaped(self, text: str, frames: Iterable[str]) -> str:
        """The text with these frames marked as text, for `encode`."""
        for frame in frames:
            text = text.replace(frame, f"x{_MARK}x{self.frames[frame]}x")
        return text

    def encode(self, rendered: Rendered) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is, at least in part, in `rendered.written`.

        Raises DataError if this tokenizer cannot write a frame as plain text.
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
        """The text with `_plain`'s names for frames, and frames marked as text spelled out again."""
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
        """A tokenizer that knows no frame by its own name. Raises DataError for a tokenizer that is not from `tokenizers`."""
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
        """Ids of `_plain` -> the tokenizer's, for all added tokens."""
        names = {text: f"{_FRAME}{number}{_FRAME}" if text in self.frames else text for text, number in self._added.items()}
        return {self._plain.token_to_id(name): self._added[text] for text, name in names.items()}
