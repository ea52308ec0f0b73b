"""Spans of time of a run, planned or measured, and the Chrome/Perfetto trace of them.

A `Span` is one thing that one lane of one component did: a phase of a rank, a request of an engine's replica, a server's call. The format
is Chrome's "Trace Event Format" (Google 2016): a process for every component, a thread for every row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NANOSECONDS = 10**9
STEP = "step"  # the span of a training step, on every rank that trains


@dataclass(frozen=True)
class Span:
    """`name` began at `start` and lasted `seconds`, both in seconds; `start` is on the run's clock, so it may be of any size.

    `component` is the actor, critic, reward model; `lane` the part of it that was busy: "rank 3", "replica 0", "requests". `arguments` are
    shown with the span. Raises ValueError for times that are not finite, and for a negative duration.
    """

    name: str
    component: str
    lane: str
    start: float
    seconds: float
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"span {self.name} of {self.component}: start {self.start} s, {self.seconds} s long")

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one lane that can be drawn in one row: each two are apart, or one holds the other. By start, the longer ones first."""

    component: str
    lane: str
    number: int  # of the lane's rows, from 0
    spans: Sequence[Span]

    @property
    def title(self) -> str:
        return f"{self.lane} ({self.number + 1})" if self.number else self.lane


def rows(spans: Iterable[Span]) -> list[Row]:
    """All spans in as few rows a lane as their order by start allows. Components as they come first, their lanes by name and number."""
    lanes: dict[str, dict[str, list[Span]]] = {}
    for span in spans:
        lanes.setdefault(span.component, {}).setdefault(span.lane, []).append(span)
    return [row for component, own in lanes.items() for lane in sorted(own, key=_natural) for row in _rows(component, lane, own[lane])]


def _rows(component: str, lane: str, spans: Sequence[Span]) -> list[Row]:
    placed: list[list[Span]] = []
    open_ends: list[list[int]] = []  # of each row: the ends of the spans that the next one can be inside of
    for span in sorted(spans, key=lambda span: (_begin(span), -_end(span), span.name)):
        begin, end = _begin(span), _end(span)
        for ends in open_ends:
            while ends and ends[-1] <= begin:
                ends.pop()
        fits = (number for number, ends in enumerate(open_ends) if not ends or end <= ends[-1])
        number = next(fits, len(placed))
        if number == len(placed):
            placed.append([])
            open_ends.append([])
        placed[number].append(span)
        open_ends[number].append(end)
    return [Row(component, lane, number, tuple(held)) for number, held in enumerate(placed)]


def last_steps(spans: Sequence[Span], count: int) -> list[Span]:
    """The spans that were under way when the last `count` training steps began, or began later; all of a run without steps."""
    numbers = {number for span in spans if (number := step_of(span))}
    first = sorted(numbers)[-count:][:1]
    begin = min((span.start for span in spans if step_of(span) in first), default=float("-inf"))
    return [span for span in spans if span.end > begin]


def step_of(span: Span) -> int:
    """The number of the training step that this span is; 0 for others."""
    number = span.arguments.get("step", 0)
    return number if span.name == STEP and isinstance(number, int) else 0


def chrome_trace(spans: Iterable[Span]) -> str:
    """The spans as a trace that chrome://tracing and ui.perfetto.dev open: complete events in microseconds, the first one's start as 0.

    Spans of a lane that overlap without one holding the other get rows of their own, "requests (2)": viewers draw a thread as a stack. The
    same spans give the same text, whatever their order within a lane.
    """
    found = rows(spans)
    zero = min((_begin(span) for row in found for span in row.spans), default=0)
    numbers: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for thread, row in enumerate(found, start=1):
        process = numbers.get(row.component)
        if process is None:
            process = numbers[row.component] = len(numbers) + 1
            events += _named("process", row.component, process, 0)
        events += _named("thread", row.title, process, thread)
        events += [_event(span, process, thread, zero) for span in row.spans]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)


def _named(kind: str, name: str, process: int, thread: int) -> list[dict[str, object]]:
    """The name of a process or thread, and its place among the others."""
    place, order = {"ph": "M", "pid": process, "tid": thread, "ts": 0}, process if kind == "process" else thread
    return [
        {"name": f"{kind}_name", **place, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **place, "args": {"sort_index": order}},
    ]


def _event(span: Span, process: int, thread: int, zero: int) -> dict[str, object]:
    begin, end = _begin(span), _end(span)
    event: dict[str, object] = {"name": span.name, "cat": span.component, "ph": "X", "pid": process, "tid": thread}
    event |= {"ts": (begin - zero) / 1000, "dur": (end - begin) / 1000}
    if span.arguments:
        event["args"] = {key: _plain(value) for key, value in span.arguments.items()}
    return event


def _plain(value: object) -> object:
    """A value that JSON can hold; anything else as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _begin(span: Span) -> int:
    return round(span.start * NANOSECONDS)


def _end(span: Span) -> int:
    """In nanoseconds, like `_begin`: sums of floats would let a child end after the span that holds it."""
    return round((span.start + span.seconds) * NANOSECONDS)


def _natural(text: str) -> list[tuple[int, str]]:
    """Orders "rank 2" before "rank 10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
