"""The one reader of run directories, in every state that a run can be in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aligner.errors import DataError
from aligner.reporting.formats import Column
from aligner.reporting.jsonl import MetricsFile
from aligner.reporting.rollout_table import write_rows
from aligner.reporting.run_view import RunView, State
from aligner.types import FinishReason, SampleRow

_ROW = SampleRow(prompt="p", response="r", reward=1.0, finish_reason=FinishReason.stop)
_COLUMNS = (Column("reward", "rollout/reward"),)


def _line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "time": 100.0 + step, "rollout/reward": step / 10, **values})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run under way: its last line of metrics is half written."""
    for folder in ("health", "logs", "rollouts", "validation", "trace"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run.json").write_text('{"run_id": "a", "created": "2026-01-02T03:04:05+0000"}')
    (tmp_path / "config.yaml").write_text("model:\n  path: m\n")
    (tmp_path / "metrics.jsonl").write_text(f"{_line(1)}\n{_line(2)}\n" + '{"step": 3, "ti')
    (tmp_path / "health" / "actor.0.json").write_text("{}")
    write_rows(tmp_path / "validation", 0, [_ROW])
    write_rows(tmp_path / "validation", 2, [_ROW, _ROW])
    write_rows(tmp_path / "rollouts", 1, [_ROW])
    span = {"name": "step", "lane": "rank 0", "start": 1.0, "seconds": 0.5}
    (tmp_path / "trace" / "actor.0.jsonl").write_text(json.dumps(span) + '\n{"name": "st')
    (tmp_path / "logs" / "actor.0.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "attempts.jsonl").write_text('{"event": "job_ended", "reason": "its node was lost"}\n{"event": "jo')
    return tmp_path


def test_a_run_under_way(run: Path) -> None:
    view = RunView(run).begun()
    assert (view.status().state, view.status().step) == (State.under_way, 2)
    assert view.config() == {"model": {"path": "m"}}
    assert [step.step for step in view.metrics()] == [1, 2] and view.newest("rollout/reward") == 0.2 and view.newest("no/such") is None
    assert view.summary(_COLUMNS).splitlines()[0] == "steps 1 to 2 in 1.0 s (1.0 s each)"
    assert view.diagnosis().num_steps == 2
    before, after = view.before_and_after()
    assert (before.step, len(before.rows), after.step, len(after.rows)) == (0, 1, 2, 2)
    assert [(one.step, one.rows) for one in view.rollouts()] == [(1, [_ROW])]
    spans, num_damaged = view.spans()
    assert [span.component for span in spans] == ["actor"] and num_damaged == 1
    assert [log.name for log in view.logs()] == ["actor.0.log"] and view.last_lines(view.logs()[0], 2) == ["two", "three"]
    assert [line["event"] for line in view.attempts()] == ["job_ended"]


def test_a_run_that_has_ended(run: Path) -> None:
    os.utime(run / "health" / "actor.0.json", (1, 1))
    assert (RunView(run).status().state, RunView(run).status().reason) == (State.ended, "its node was lost")
    (run / "lease.json").write_text("{}")  # of a launcher that lives
    assert RunView(run).status().state is State.under_way
    (run / "done.json").write_text('{"step": 2}')
    (run / "learnt_nothing.txt").write_text("every reward is 0")
    assert (RunView(run).status().state, RunView(run).status().reason) == (State.done, "every reward is 0")


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_failed_early_has_empty_results(exists: bool, tmp_path: Path) -> None:
    view = RunView(tmp_path / "run")
    if exists:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.json").write_text("{}")
    assert (view.status().state, view.status().step) == (State.ended if exists else State.absent, 0)
    assert (view.config(), view.metrics(), view.metrics_since(0), view.spans()) == ({}, [], ([], 0), ([], 0))
    assert (view.before_and_after(), view.rollouts(), view.attempts(), view.logs()) == ((None, None), [], [], [])
    assert view.summary(_COLUMNS).startswith("no steps in") and view.newest("x") is None
    with pytest.raises(DataError, match=r"^--against run: has no metrics.jsonl"):
        view.begun("--against run")


def test_damage_is_an_error_that_names_the_line(run: Path) -> None:
    (run / "metrics.jsonl").write_text(f"{_line(1)}\nnot json\n")
    with pytest.raises(DataError, match=r"metrics.jsonl:2"):
        RunView(run).metrics()


def test_metrics_since_an_offset_follow_a_run(tmp_path: Path) -> None:
    view, path = RunView(tmp_path), tmp_path / "metrics.jsonl"

    def seen(offset: int) -> tuple[list[tuple[int, dict[str, float]]], int]:
        steps, offset = view.metrics_since(offset)
        return [(one.step, one.values) for one in steps], offset

    file = MetricsFile(path)
    file.write(1, {"a": 1.0})
    file.write(2, {"a": 2.0})
    steps, offset = seen(0)
    assert steps == [(1, {"a": 1.0}), (2, {"a": 2.0})]
    file.write(2, {"b": 3.0})  # merged into the line that was read
    file.write(3, {"a": 4.0})
    with path.open("a") as torn:
        torn.write('{"step": 4, ')
    steps, offset = seen(offset)
    assert steps == [(2, {"a": 2.0, "b": 3.0}), (3, {"a": 4.0})]
    MetricsFile(path, resumed_step=1)  # a new file without the later steps
    assert seen(offset)[0] == [(1, {"a": 1.0})]
