"""`aligner trace`: what every process of a run did when, as one file for trace viewers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.errors import AlignerError, DataError, describe_os_error
from aligner.files import publish
from aligner.reporting.run_view import RunView
from aligner.telemetry.spans import Span, chrome_trace

STEP = "step"  # the span of a training step, on every rank that trains


def trace(directory: Path, output: Path | None = None, *, steps: int = 0) -> int:
    """Write the trace of a run, which may be under way, to `output` (None: trace.json in its directory); of its last `steps` (0: of all).

    Raises DataError if nothing has been recorded, AlignerError if the file cannot be written.
    """
    run = RunView(directory)
    output = run.files.path / "trace.json" if output is None else output
    spans, num_damaged = run.spans()
    if not spans:
        raise DataError(f"{directory}: has no spans in {run.files.trace.name}/; expected the directory of a run with run.trace_mib above 0")
    spans = last_steps(spans, steps) if steps else spans
    print(_summary(spans, num_damaged))
    publish_text(output, chrome_trace(spans), "the trace", ": open it with https://ui.perfetto.dev or chrome://tracing")
    return 0


def publish_text(path: Path, text: str, what: str, use: str = "") -> None:
    """Write a file, and print that it is there and its `use`. Raises AlignerError if it cannot be written."""
    try:
        publish(path, lambda new: new.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise AlignerError(f"{what} could not be written: {describe_os_error(error, path)}") from error
    print(f"written to {path}{use}")


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


def _summary(spans: Sequence[Span], num_damaged: int) -> str:
    components = {span.component: 0 for span in spans}
    for span in spans:
        components[span.component] += 1
    steps = [number for span in spans if (number := step_of(span))]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    counted = ", ".join(f"{count:,} of {name}" for name, count in components.items())
    text = f"{len(spans):,} spans ({counted}) in {seconds:,.1f} s"
    text += f", training steps {min(steps)} to {max(steps)}" if steps else ""
    return text + (f"; {num_damaged} lines that were cut when a process was killed are left out" if num_damaged else "")
