from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import DataError
from aligner.reporting.config import LoggingConfig, Progress
from aligner.reporting.formats import Column, Goal
from aligner.reporting.jsonl import read_metrics
from aligner.reporting.reporter import Reporter
from aligner.reporting.rollout_table import SampleRow, write_rows
from aligner.reporting.run_view import RunView
from aligner.types import FinishReason

_COLUMNS = (Column("reward", "reward/mean", ".2f", Goal.highest), Column("KL", "policy/kl", ".3f"), Column("none", "no/such"))
_ROWS = [SampleRow(prompt=f"p{i}", response=f"r{i}", reward=float(i), finish_reason=FinishReason.stop) for i in range(6)]


def _reporter(run: RunDirectory, stream: io.StringIO, start_step: int = 0, **settings) -> Reporter:
    config = LoggingConfig(**{"num_table_rows": 2, **settings})
    return Reporter(config, run_directory=run, columns=_COLUMNS, total_steps=6, start_step=start_step, stream=stream)


def test_a_run_and_its_resume(tmp_path: Path) -> None:
    run, stream = RunDirectory(tmp_path / "run").create(), io.StringIO()
    with _reporter(run, stream) as reporter:
        for step in (1, 2, 3):
            reporter.log(step, {"reward/mean": step / 10})
        reporter.table(3, _ROWS)
    with _reporter(run, stream, start_step=2) as reporter:
        reporter.log(3, {"reward/mean": 0.5})
        reporter.note("hello")
    assert [(r.step, r.values) for r in read_metrics(run.metrics)] == [
        (1, {"reward/mean": 0.1}),
        (2, {"reward/mean": 0.2}),
        (3, {"reward/mean": 0.5}),
    ]
    output = stream.getvalue()
    assert "step 1/6  reward 0.10" in output and "resumed at step 2: 1 later steps were cut from metrics.jsonl" in output
    assert "p1" in output and "p2" not in output  # num_table_rows
    assert len((run.rollouts / "step_000003.jsonl").read_text().splitlines()) == 6
    assert len(list(run.tensorboard.glob("events*"))) == 2
    assert output.endswith("hello\n")


def test_an_error_inside_closes_everything(tmp_path: Path) -> None:
    run, stream = RunDirectory(tmp_path / "run").create(), io.StringIO()
    with pytest.raises(KeyError), _reporter(run, stream, progress=Progress.live) as reporter:
        reporter.log(1, {"reward/mean": 0.5})
        raise KeyError("bug")
    assert "\x1b[?25l" in stream.getvalue()  # cursor hidden ...
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # ... and given back


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "time": 100.0, "reward/mean": 0.0, "policy/kl": 0.0}\n'
        '{"step": 2, "time": 103.0, "reward/mean": 0.75, "policy/kl": "NaN"}\n'
        '{"step": 3, "time": 106.0, "reward/mean": 0.5}\n'
    )
    assert RunView(path.parent).summary(_COLUMNS).splitlines() == [
        "steps 1 to 3 in 6.0 s (3.0 s each)",
        "metric  first  last      best  course",
        "reward   0.00  0.50  0.75 @ 2  ▁█▆",
        "KL      0.000   nan            ▄x",
    ]


SEEN = '"learnt/samples_seen": 4, "learnt/tokens_seen": 20'


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (  # of four responses each: two learnt from, five cut and one without a reward; the second step was empty
            '"learnt/tokens": 9, "learnt/samples": 2, "left_out/truncated": 2, "optim/updates": 1, "optim/skipped": 1',
            '"learnt/tokens": 0, "learnt/samples": 0, "left_out/truncated": 3, "left_out/no_reward": 1',
            "learnt from 2 of 8 samples (25.0%), 9 of 40 tokens (22.5%), 1 of 2 updates (50.0%); left out: 62.5% cut at the length limit, "
            "12.5% without a valid reward, 1 updates by the guard; nothing in 1 of 2 steps",
        ),
        (  # one whose float16 gradient overflowed is no step without anything to learn
            '"learnt/tokens": 20, "learnt/samples": 4, "optim/updates": 0, "optim/skipped": 0, "optim/overflows": 1',
            '"learnt/tokens": 20, "learnt/samples": 4, "optim/updates": 1, "optim/skipped": 0, "optim/overflows": 0',
            "learnt from 8 samples, 40 tokens, 1 of 2 updates (50.0%); left out: 1 updates whose float16 gradients overflowed",
        ),
    ],
)
def test_summary_says_what_was_learnt_from(first: str, second: str, said: str, tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "time": {step}.0, {SEEN}, {counts}}}\n' for step, counts in ((1, first), (2, second))]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert RunView(tmp_path).summary(_COLUMNS).splitlines()[-1] == said


def test_steps_that_are_lost_are_said(tmp_path: Path) -> None:
    run, stream = RunDirectory(tmp_path / "run").create(), io.StringIO()
    with _reporter(run, stream) as reporter:
        assert reporter.lost == ""
        for step in (1, 2, 3):
            reporter.log(step, {"reward/mean": step / 10})
    run.metrics.write_bytes(run.metrics.read_bytes()[:-5])  # the node died
    with _reporter(run, stream, start_step=3) as reporter:
        reporter.log(4, {"reward/mean": 0.5})
    assert stream.getvalue().count("warning: metrics.jsonl has no whole line of step 3: torn, or lost to a full disk") == 1
    stream.truncate(0)
    with _reporter(run, stream) as reporter:
        assert reporter.lost == "warning: no checkpoint to resume from: 3 steps of an earlier start are lost"
    assert reporter.lost in stream.getvalue() and "resumed at" not in stream.getvalue()
    run.metrics.unlink()
    with _reporter(run, stream, start_step=10):
        assert "has no whole line of step 1, 2, 3, 4, 5, 6, 7, 8 and 2 more:" in stream.getvalue()


def _line(step: int) -> str:
    return json.dumps({"step": step, "time": 100.0 + step, "reward/mean": step / 10})


def test_a_view_of_a_run_under_way(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{_line(1)}\n{_line(2)}\n" + '{"step": 3, "ti')
    write_rows(tmp_path / "validation", 0, _ROWS[:1])
    write_rows(tmp_path / "validation", 2, _ROWS[:2])
    (tmp_path / "trace").mkdir()
    span = {"name": "step", "lane": "rank 0", "start": 1.0, "seconds": 0.5}
    (tmp_path / "trace" / "actor.0.jsonl").write_text(json.dumps(span) + '\n{"name": "st')
    view = RunView(tmp_path).begun()
    assert [step.step for step in view.metrics()] == [1, 2] and view.newest("reward/mean") == 0.2 and view.newest("no/such") is None
    assert view.summary(_COLUMNS).splitlines()[0] == "steps 1 to 2 in 1.0 s (1.0 s each)"
    assert view.diagnosis().num_steps == 2
    before, after = view.before_and_after()
    assert (before.step, len(before.rows), after.step, len(after.rows)) == (0, 1, 2, 2)
    spans, num_damaged = view.spans()
    assert [span.component for span in spans] == ["actor"] and num_damaged == 1


@pytest.mark.parametrize("exists", [True, False])
def test_a_view_of_a_run_that_failed_early_is_empty(exists: bool, tmp_path: Path) -> None:
    view = RunView(tmp_path / "run")
    if exists:
        (tmp_path / "run").mkdir()
    assert (view.metrics(), view.spans(), view.before_and_after(), view.newest("x")) == ([], ([], 0), (None, None), None)
    assert view.summary(_COLUMNS) == f"no steps in {tmp_path / 'run' / 'metrics.jsonl'}"
    with pytest.raises(DataError, match=r"^--against run: has no metrics.jsonl"):
        view.begun("--against run")
