"""The one reader of run directories: of a run that is under way, has failed early, or is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.errors import DataError
from aligner.reporting.formats import Column
from aligner.reporting.rollout_table import write_rows
from aligner.reporting.run_view import RunView
from aligner.types import FinishReason, SampleRow

_ROW = SampleRow(prompt="p", response="r", reward=1.0, finish_reason=FinishReason.stop)
_COLUMNS = (Column("reward", "rollout/reward"),)


def _line(step: int) -> str:
    return json.dumps({"step": step, "time": 100.0 + step, "rollout/reward": step / 10})


def test_a_run_under_way(tmp_path: Path) -> None:
    """Its last lines are half written."""
    (tmp_path / "metrics.jsonl").write_text(f"{_line(1)}\n{_line(2)}\n" + '{"step": 3, "ti')
    write_rows(tmp_path / "validation", 0, [_ROW])
    write_rows(tmp_path / "validation", 2, [_ROW, _ROW])
    (tmp_path / "trace").mkdir()
    span = {"name": "step", "lane": "rank 0", "start": 1.0, "seconds": 0.5}
    (tmp_path / "trace" / "actor.0.jsonl").write_text(json.dumps(span) + '\n{"name": "st')
    view = RunView(tmp_path).begun()
    assert [step.step for step in view.metrics()] == [1, 2] and view.newest("rollout/reward") == 0.2 and view.newest("no/such") is None
    assert view.summary(_COLUMNS).splitlines()[0] == "steps 1 to 2 in 1.0 s (1.0 s each)"
    assert view.diagnosis().num_steps == 2
    before, after = view.before_and_after()
    assert (before.step, len(before.rows), after.step, len(after.rows)) == (0, 1, 2, 2)
    spans, num_damaged = view.spans()
    assert [span.component for span in spans] == ["actor"] and num_damaged == 1


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_failed_early_has_empty_results(exists: bool, tmp_path: Path) -> None:
    view = RunView(tmp_path / "run")
    if exists:
        (tmp_path / "run").mkdir()
    assert (view.metrics(), view.spans(), view.before_and_after(), view.newest("x")) == ([], ([], 0), (None, None), None)
    assert view.summary(_COLUMNS) == f"no steps in {tmp_path / 'run' / 'metrics.jsonl'}"
    with pytest.raises(DataError, match=r"^--against run: has no metrics.jsonl"):
        view.begun("--against run")
