"""Tools that a policy calls in its text, in either of two forms:

    <tool>name: the tool's input, as text</tool>
    <tool_call>{"name": "name", "arguments": {"x": 1}}</tool_call>      (the format of Qwen and Hermes models)

Any error, in parsing a call or in the tool, becomes the call's answer and is counted: a policy's text must not end a run.
"""

from __future__ import annotations

import inspect
import json
import reprlib
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from aligner.environments.environment import encodable

OPEN, CLOSE = "<tool>", "</tool>"
JSON_OPEN, JSON_CLOSE = "<tool_call>", "</tool_call>"
MOST_CHARACTERS = 2000  # of a tool's answer; an observation uses up the policy's context


class ToolError(Exception):
    """An invalid tool request, reported to the policy. Other exceptions of a tool are reported too, and logged: once for each tool and
    kind of exception, with the first traceback."""


Call = tuple[str, str | Mapping[str, Any]]  # the name of a tool, and its arguments as one text, or by name


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswers:
    """The answers to all calls of a turn, one per line; the numbers of calls and of errors."""

    text: str
    num_calls: int
    num_errors: int

    @property
    def counts(self) -> dict[str, float]:
        return {"tool_calls": float(self.num_calls), "tool_errors": float(self.num_errors)}


class Toolbox:
    """Tools by name. A tool is a function of text or of named arguments that returns something with a `str`.

    The type hints of a tool are the schema of its arguments (text, numbers, bool, None, lists, dictionaries and their combinations in
    `typing`): a call that does not fit is answered with an error, without calling the tool. Other hints are not checked.

    `open` and `close` surround a call in the first form; with only one tool, its name may be omitted. If `open` is '', a call begins at
    the beginning of the turn, or at the end of the previous call.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]], *, open: str = OPEN, close: str = CLOSE) -> None:
        if not tools:
            raise ValueError("tools is empty, expected at least one")
        if not close:
            raise ValueError("close is '', expected the text that ends a call")
        self._tools = {name: (tool, _signature(tool)) for name, tool in tools.items()}
        self._marks = open, close
        self._said: set[tuple[str, type[Exception]]] = set()

    def answer(self, text: str) -> ToolAnswers | None:
        """Make the calls in the policy's text, in order; None if there are none."""
        found: list[tuple[int, Callable[[str], Call], str]] = []
        others: list[str] = []
        end = 0
        for start, body, after in _between(text, JSON_OPEN, JSON_CLOSE):
            found.append((start, self._read_json, body))
            others += [text[end:start], " " * (after - start)]  # keeps later positions
            end = after
        found += [(start, self._read_plain, body) for start, body, _ in _between("".join([*others, text[end:]]), *self._marks)]
        if not found:
            return None
        answers, num_errors = [], 0
        for _, read, body in sorted(found, key=lambda each: each[0]):
            try:
                answers.append(encodable(self._call(*read(body))[:MOST_CHARACTERS]))
            except ToolError as error:
                answers.append(encodable(f"error: {error}"[:MOST_CHARACTERS]))
                num_errors += 1
        return ToolAnswers(text="\n".join(answers), num_calls=len(found), num_errors=num_errors)

    def _read_plain(self, body: str) -> Call:
        name, colon, rest = body.partition(":")
        if colon and name.strip() in self._tools:
            return name.strip(), rest.strip()
        if len(self._tools) == 1:
            return next(iter(self._tools)), body.strip()
        raise ToolError(f"expected NAME: TEXT with one of the tools {', '.join(self._tools)}")

    def _read_json(self, body: str) -> Call:
        try:
            value = json.loads(body, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the call is not JSON ({error})") from error
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), (dict, str)):
            raise ToolError('expected {"name": NAME, "arguments": {...}}')
        return value["name"], value.get("arguments", {})

    def _call(self, called: str, arguments: str | Mapping[str, Any]) -> str:
        """The tool's answer. Raises ToolError, whatever the tool raises."""
        if called not in self._tools:
            raise ToolError(f"unknown tool {called!r}; available: {', '.join(self._tools)}")
        tool, signature = self._tools[called]
        positional, keywords = ((), arguments) if isinstance(arguments, Mapping) else ((arguments,), {})
        try:
            bound = signature.bind(*positional, **keywords)
        except TypeError as error:
            raise ToolError(f"{called}: {error}") from error
        for name, value in keywords.items():
            one = signature.parameters.get(name) or list(signature.parameters.values())[-1]  # it collects all other names
            if value is not one.default and not _fits(value, one.annotation):
                expected = inspect.formatannotation(one.annotation)
                raise ToolError(f"{called}: {name} is {reprlib.repr(value)}, expected {expected}")
        try:
            return str(tool(*bound.args, **bound.kwargs))
        except ToolError:
            raise
        except Exception as error:  # not swallowed: the policy sees it, it is counted, and the first of its kind is logged
            if (kind := (called, type(error))) not in self._said:
                self._said.add(kind)
                shown = encodable("".join(traceback.format_exception(error))[-MOST_CHARACTERS:])
                print(f"warning: tool {called} raised {kind[1].__name__}; the policy is told (logged once)\n{shown}", flush=True)
            raise ToolError(f"{called}: {traceback.format_exception_only(error)[-1].strip()}") from error


def _between(text: str, open: str, close: str) -> Iterator[tuple[int, str, int]]:
    """(begin, text between the marks, end) of each call; in one pass, however many marks are never closed."""
    end = 0
    while (start := text.find(open, end)) >= 0 and (stop := text.find(close, start + len(open))) >= 0:
        end = stop + len(close)
        yield start, text[start + len(open) : stop], end


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _signature(tool: Callable[..., Any]) -> inspect.Signature:
    """A tool's signature; a permissive one if it is unknown (some built-in functions, hints with undefined names)."""
    try:
        return inspect.signature(tool, eval_str=True)
    except Exception:  # evaluating a hint may raise anything
        return inspect.signature(lambda *text, **arguments: None)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has this type; true for hints that do not restrict JSON."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Annotated:
        return _fits(value, inner[0])
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind is float:
        return type(value) in (int, float) and value - value == 0  # false for infinity and NaN
    if kind in (str, int, bool, types.NoneType):
        return type(value) is kind
    if kind in (list, Sequence):
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value if inner)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values() if inner)
    return True
