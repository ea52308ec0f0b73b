"""Tools that a policy calls in its text, in either of two forms:

    <tool>name: what the tool is given, as text</tool>
    <tool_call>{"name": "name", "arguments": {"x": 1}}</tool_call>      (as Qwen and Hermes models are trained to)

A malformed call is answered with its error, and counted.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool>", "</tool>"
JSON_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MOST_CHARACTERS = 2000  # of a tool's answer; an observation takes room from the policy


class ToolError(Exception):
    """An invalid tool request by the policy, which is told so. Any other exception of a tool is a failure of the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call: the name of a tool, and its arguments by name, or as one text."""

    name: str
    arguments: str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswers:
    """The answers to all calls of a turn, a line each; the number of calls and of error answers."""

    text: str
    num_calls: int
    num_errors: int

    @property
    def counts(self) -> dict[str, float]:
        """For `Observation.counts`."""
        return {"tool_calls": float(self.num_calls), "tool_errors": float(self.num_errors)}


class Toolbox:
    """Tools by name. A tool is a function of text or of named arguments that returns something with a `str`.

    `open` and `close` stand around a call in the first form; with only one tool, its name may be omitted. An `open` of '' means
    that a call begins where the turn, or the call before it, does.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]], *, open: str = OPEN, close: str = CLOSE) -> None:
        if not tools:
            raise ValueError("tools is empty, expected at least one")
        if not close:
            raise ValueError("close is '', expected the text that ends a call")
        self._tools = dict(tools)
        self._plain_call = re.compile(re.escape(open) + "(.*?)" + re.escape(close), re.DOTALL)

    def answer(self, text: str) -> ToolAnswers | None:
        """Make the calls in what the policy wrote, in their order; None if there are none."""
        found = [(match.start(), self._read_json, match[1]) for match in JSON_CALL.finditer(text)]
        found += [(match.start(), self._read_plain, match[1]) for match in self._plain_call.finditer(JSON_CALL.sub(_blank, text))]
        if not found:
            return None
        answers, num_errors = [], 0
        for _, read, body in sorted(found, key=lambda each: each[0]):
            try:
                answers.append(str(self._call(read(body)))[:MOST_CHARACTERS])
            except ToolError as error:
                answers.append(f"error: {error}"[:MOST_CHARACTERS])
                num_errors += 1
        return ToolAnswers(text="\n".join(answers), num_calls=len(found), num_errors=num_errors)

    def _read_plain(self, body: str) -> ToolCall:
        name, colon, rest = body.partition(":")
        if colon and name.strip() in self._tools:
            return ToolCall(name=name.strip(), arguments=rest.strip())
        if len(self._tools) == 1:
            return ToolCall(name=next(iter(self._tools)), arguments=body.strip())
        raise ToolError(f"expected NAME: TEXT with one of the tools {', '.join(self._tools)}")

    def _read_json(self, body: str) -> ToolCall:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the call is not JSON ({error})") from error
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), (dict, str)):
            raise ToolError('expected {"name": NAME, "arguments": {...}}')
        return ToolCall(name=value["name"], arguments=value.get("arguments", {}))

    def _call(self, call: ToolCall) -> Any:
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        tool, named = self._tools[call.name], isinstance(call.arguments, Mapping)
        positional, keywords = ((), call.arguments) if named else ((call.arguments,), {})
        try:
            bound = inspect.signature(tool).bind(*positional, **keywords)
        except TypeError as error:
            raise ToolError(f"{call.name}: {error}") from error
        return tool(*bound.args, **bound.kwargs)


def _blank(match: re.Match[str]) -> str:
    """As many spaces: what follows stays where it is."""
    return " " * len(match[0])
