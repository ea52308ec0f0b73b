"""Spans, the rows that they are drawn in, and the trace that Chrome and Perfetto read."""

from __future__ import annotations

import json
import math
import random

import pytest

from aligner.telemetry.spans import Span, chrome_trace, rows


def _events(spans):
    """The trace, read back: (names of processes, names of threads, complete events); checked against the trace event format."""
    trace = json.loads(chrome_trace(spans))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    processes, threads, complete = {}, {}, []
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["ts"], (int, float))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            key = "name" if event["name"].endswith("_name") else "sort_index"
            assert list(event["args"]) == [key] and isinstance(event["args"][key], str if key == "name" else int)
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["cat"], str)
            complete.append(event)
    for event in complete:  # every event has a place that has a name
        assert event["pid"] in processes and (event["pid"], event["tid"]) in threads
    assert len(set(threads.values())) >= 1 or not complete
    return processes, threads, complete


def test_trace_of_two_components():
    spans = [
        Span("generate", "actor", "rank 10", 100.5, 2.0, {"tokens": 7, "share": math.inf}),
        Span("step", "actor", "rank 2", 100.0, 4.0),
        Span("generate", "actor", "rank 2", 100.0, 2.5),
        Span("values", "critic", "requests", 102.25, 0.000001),
    ]
    processes, threads, events = _events(spans)
    assert processes == {1: "actor", 2: "critic"}
    assert threads == {(1, 1): "rank 2", (1, 2): "rank 10", (2, 3): "requests"}
    found = [(event["name"], threads[event["pid"], event["tid"]], event["ts"], event["dur"], event.get("args")) for event in events]
    assert found == [
        ("step", "rank 2", 0.0, 4e6, None),
        ("generate", "rank 2", 0.0, 2.5e6, None),
        ("generate", "rank 10", 0.5e6, 2e6, {"tokens": 7, "share": "inf"}),
        ("values", "requests", 2.25e6, 1.0, None),
    ]


def test_overlapping_spans_get_rows_of_their_own():
    spans = [Span("a", "actor", "requests", 0.0, 2.0), Span("b", "actor", "requests", 1.0, 2.0), Span("c", "actor", "requests", 2.0, 1.0)]
    _, threads, events = _events(spans)
    assert [(event["name"], threads[1, event["tid"]]) for event in events] == [("a", "requests"), ("c", "requests"), ("b", "requests (2)")]
    assert [(row.title, [span.name for span in row.spans]) for row in rows(spans)] == [("requests", ["a", "c"]), ("requests (2)", ["b"])]


def test_rows_are_stacks_whatever_the_spans_and_their_order():
    draw = random.Random(3)
    spans = [Span(str(number), "actor", "requests", draw.random() * 10 + 1.7e9, draw.random()) for number in range(300)]
    spans += [Span("all", "actor", "requests", 1.7e9, 11.0), Span("empty", "actor", "requests", 1.7e9, 0.0)]
    text = chrome_trace(spans)
    by_thread = {}
    for event in _events(spans)[2]:
        by_thread.setdefault(event["tid"], []).append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    assert sum(len(found) for found in by_thread.values()) == len(spans) and len(by_thread) < 60
    for found in by_thread.values():
        stack = []
        for begin, end in found:
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
    draw.shuffle(spans)
    assert chrome_trace(spans) == text


def test_no_spans():
    assert json.loads(chrome_trace([])) == {"displayTimeUnit": "ms", "traceEvents": []}


@pytest.mark.parametrize("start, seconds", [(math.nan, 1.0), (0.0, -1.0), (0.0, math.inf)])
def test_times_that_are_none(start, seconds):
    with pytest.raises(ValueError, match="span a of actor"):
        Span("a", "actor", "rank 0", start, seconds)
