"""`aligner report`: what a run did, on the terminal and as one HTML file. `aligner diagnose`: what went wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

from aligner.algorithms.registry import recipes
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import AlignerError, DataError, describe_os_error
from aligner.reporting import diagnosis
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import read_metrics
from aligner.reporting.samples_report import before_and_after, text_of, write_report
from aligner.reporting.summary import summary


def report(directory: Path, output: Path | None = None) -> int:
    """Print the summary of a run and its samples before and after, and write `output` (None: report.html in the run's directory).

    Raises DataError if there is no run, or its files are damaged; AlignerError if the file cannot be written.
    """
    run = _begun(directory)
    output = run.path / "report.html" if output is None else output
    try:
        write_report(run.path, output)
    except OSError as error:
        raise AlignerError(f"the report could not be written: {describe_os_error(error, output)}") from error
    print(summary(run.metrics, all_columns()))
    for finding in diagnosis.diagnose(read_metrics(run.metrics), RULES).findings:
        print(f"\n{finding.text()}")
    if text := text_of(*before_and_after(run.validation)):
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
    found = diagnosis.diagnose(read_metrics(_begun(directory).metrics), RULES)
    print(json.dumps(found.record(), indent=2) if as_json else found.text())
    return int(bool(found.findings))


def _begun(directory: Path) -> RunDirectory:
    """The directory of a run. Raises DataError if it has no metrics."""
    run = RunDirectory(directory)
    if not run.metrics.is_file():
        raise DataError(f"{directory}: has no {run.metrics.name}; expected the directory of a run that has begun to train")
    return run
