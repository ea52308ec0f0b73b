"""Commands on a run's directory: `aligner report`, `aligner diagnose` and `aligner trace`, what every process of a run did when."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aligner.algorithms.registry import recipes
from aligner.errors import AlignerError, DataError, describe_os_error
from aligner.reporting.charts import Panel
from aligner.reporting.evaluations import markdown, read_evaluations
from aligner.reporting.formats import Column
from aligner.reporting.pages import publish_text
from aligner.reporting.run_view import RunView
from aligner.reporting.samples_report import text_of, write_report
from aligner.telemetry.spans import Span, chrome_trace, last_steps, step_of


def report(directories: Sequence[Path], output: Path | None = None) -> int:
    """Print each run's summary and its samples before and after, and write `output` (None: report.html in the first directory)."""
    runs = [RunView(directory).begun(str(directory)) for directory in directories]
    output = runs[0].files.path / "report.html" if output is None else output
    columns = all_columns()
    try:
        write_report(runs, output, columns, planned)
    except OSError as error:
        raise AlignerError(f"the report could not be written: {describe_os_error(error, output)}") from error
    for directory, run in zip(directories, runs, strict=True):
        print(f"\n{directory}\n" * (len(runs) > 1) + run.summary(columns))
        for finding in run.diagnosis().findings:
            print(f"\n{finding.text()}")
        if text := text_of(*run.before_and_after()):
            print(f"\n{text}")
        for record in read_evaluations(run.files.evaluations):
            print(f"\n{markdown(record)}")
    print(f"\nwritten to {output}")
    return 0


def planned(run: RunView) -> list[Panel]:
    """The chart of a run's measured step beside the plan's; nothing if there are no two steps or the model is elsewhere."""
    from aligner.commands.plan.command import against  # Megatron-Core comes with it

    try:
        return [against(run.files.path).chart()]
    except AlignerError:  # two steps are not over, or its model is elsewhere: `aligner plan --against` says what is missing
        return []


def all_columns() -> list[Column]:
    """Columns of all recipes, each metric once; a table shows those that the run has."""
    return list({column.metric: column for recipe in recipes().values() for column in recipe.columns}.values())


def diagnose(directory: Path, *, as_json: bool = False) -> int:
    """Print the rules' findings in the metrics of a run, which may still be running. Returns 1 if there are findings, else 0."""
    found = RunView(directory).begun(str(directory)).diagnosis()
    print(json.dumps(found.record(), indent=2) if as_json else found.text())
    return int(bool(found.findings))


def trace(directory: Path, output: Path | None = None, *, steps: int = 0) -> int:
    """Write a run's trace to `output` (None: trace.json in its directory); of its last `steps` (0: of all)."""
    run = RunView(directory)
    output = run.files.path / "trace.json" if output is None else output
    spans, num_damaged = run.spans()
    if not spans:
        raise DataError(f"{directory}: has no spans in {run.files.trace.name}/; expected the directory of a run with run.trace_mib above 0")
    spans = last_steps(spans, steps) if steps else spans
    print(_summary(spans, num_damaged))
    publish_text(output, chrome_trace(spans), "the trace", ": open it with https://ui.perfetto.dev or chrome://tracing")
    return 0


def _summary(spans: Sequence[Span], num_damaged: int) -> str:
    components = Counter(span.component for span in spans)
    steps = [number for span in spans if (number := step_of(span))]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    counted = ", ".join(f"{count:,} of {name}" for name, count in components.items())
    text = f"{len(spans):,} spans ({counted}) in {seconds:,.1f} s"
    text += f", training steps {min(steps)} to {max(steps)}" if steps else ""
    return text + (f"; {num_damaged} lines that were cut when a process was killed are left out" if num_damaged else "")
