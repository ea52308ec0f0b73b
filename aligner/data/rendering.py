"""Renders chat templates. A template is a program that comes with a model, so what it may take is bounded.

Before a template's first record a few conversations are rendered in a process of its own with a limit of memory and time, which ends
what no record could be rendered with (`{{ 'x' * 10**10 }}`, endless loops). After that records are rendered here, with a limit of time.
The language is that of `transformers`: its sandbox, filters and functions, `{% generation %}`, `{% break %}`.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from datetime import time as midnight
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.errors import ConfigError, DataError

MOST_SECONDS = 10.0  # for one conversation, and for all of those that are tried at first
MOST_BYTES = 2**30  # of the process in which they are tried
MOST_CHARACTERS = 2**26  # of a rendered conversation, and of what `*` makes
_MARK = secrets.token_hex(6)  # no text from outside has it
_OPEN, _CLOSE = f"<{_MARK}(", f"<{_MARK})"  # around what an assistant wrote
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
    """The text of a conversation, and the [start, stop) of characters that stand in `{% generation %}`."""

    text: str
    written: tuple[tuple[int, int], ...]


def writes_dates(template: str) -> bool:
    """Whether the text depends on the day."""
    return "strftime_now" in template


def render(template: str, messages: Sequence[Mapping[str, Any]], *, day: date, **variables: Any) -> Rendered:
    """Render a conversation. `variables`: `tools`, `add_generation_prompt`, `bos_token` and the like; `day`: today for the template.

    Raises: DataError with the template's message, of whatever kind its exception is; ConfigError for one that exceeds the limits, or is no
    Jinja.
    """
    _try_out(template)
    return _render(template, messages, day, variables)


def _render(template: str, messages: Sequence[Mapping[str, Any]], day: date, variables: Mapping[str, Any]) -> Rendered:
    now = datetime.combine(day, midnight())
    clock = _Clock()
    try:
        text = _compiled(template).render(messages=messages, strftime_now=now.strftime, tick_=clock.tick, **variables)
    except Exception as error:  # a program from outside: whatever it raises
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
    """Ends a template whose loops take too long; called in every turn of every loop and in every macro."""

    def __init__(self) -> None:
        self._ticks, self._end = 0, time.monotonic() + MOST_SECONDS

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % 256 == 0 and time.monotonic() > self._end:
            raise TimeoutError(f"it takes longer than {MOST_SECONDS:.0f} seconds")


class _Generation(Extension):
    """`{% generation %}` around what an assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """That of `transformers`, without chance: `random` and `lipsum` would give other tokens each time."""

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
    """Without the escapes for HTML of Jinja's own."""
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
    """Raise ConfigError if the template takes more time or memory than any may. What else it raises is for records to tell."""
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
    """The program of that process: exits with an error if a limit is met."""
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
