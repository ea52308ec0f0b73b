"""`aligner report`: what a run did, on the terminal and as one HTML file. `aligner diagnose`: what went wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

from aligner.algorithms.registry import recipes
from aligner.errors import AlignerError, describe_os_error
from aligner.reporting.formats import Column
from aligner.reporting.run_view import RunView
from aligner.reporting.samples_report import text_of, write_report


def report(directory: Path, output: Path | None = None) -> int:
    """Print the summary of a run and its samples before and after, and write `output` (None: report.html in the run's directory).

    Raises DataError if there is no run, or its files are damaged; AlignerError if the file cannot be written.
    """
    run = RunView(directory).begun(str(directory))
    output = run.files.path / "report.html" if output is None else output
    try:
        write_report(run, output)
    except OSError as error:
        raise AlignerError(f"the report could not be written: {describe_os_error(error, output)}") from error
    print(run.summary(all_columns()))
    for finding in run.diagnosis().findings:
        print(f"\n{finding.text()}")
    if text := text_of(*run.before_and_after()):
        print(f"\n{text}")
    print(f"\nwritten to {output}")
    return 0


def all_columns() -> list[Column]:
    """Columns of all recipes, each metric once; a table shows those that the run has."""
    return list({column.metric: column for recipe in recipes().values() for column in recipe.columns}.values())


def diagnose(directory: Path, *, as_json: bool = False) -> int:
    """Print the rules' findings in the metrics of a run, which may still be running. Returns 1 if there are findings, else 0.

    Raises DataError if there is no run, or its metrics are damaged.
    """
    found = RunView(directory).begun(str(directory)).diagnosis()
    print(json.dumps(found.record(), indent=2) if as_json else found.text())
    return int(bool(found.findings))
