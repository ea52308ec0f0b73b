from __future__ import annotations

import io
import re

import pytest

from aligner.reporting.config import LoggingConfig, Progress
from aligner.reporting.formats import Column, Goal
from aligner.reporting.progress import Pace, PlainView, open_view, phases, step_seconds
from aligner.reporting.rollout_table import SampleRow
from aligner.types import FinishReason

_COLUMNS = (
    Column("reward", "reward/mean", ".2f", Goal.highest),
    Column("accuracy", "validation/accuracy", "percent"),
    Column("", "rollout/tokens_per_second", "tokens/s"),
    Column("never", "no/such"),
)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_remaining_time_is_that_of_the_recent_steps_without_the_first() -> None:
    clock = _Clock()
    pace = Pace(total_steps=10, start_step=0, clock=clock)
    assert pace.remaining_seconds() is None and pace.eta() == ""
    clock.now = 30.0  # the first step holds compilation, allocation, ...
    pace.finish(1)
    assert pace.remaining_seconds() == 9 * 30
    for step in (2, 3):
        clock.now += 2.0
        pace.finish(step)
    assert pace.remaining_seconds() == 7 * 2
    clock.now += 1.5  # into step 4
    assert pace.remaining_seconds() == 7 * 2 - 1.5
    assert pace.eta() == "ETA 12.5 s"
    pace.finish(10)
    assert pace.eta() == "done"
    resumed = Pace(total_steps=103, start_step=100, clock=clock)
    clock.now += 5.0
    resumed.finish(101)
    assert resumed.remaining_seconds() == 10.0


def test_phases() -> None:
    metrics = {"time/generate": 1.0, "time/ref_logprobs_seconds": 0.5, "time/step": 2.0, "reward/mean": 3.0}
    assert phases(metrics) == {"generate": 1.0, "ref_logprobs": 0.5}
    assert step_seconds(metrics) == 2.0
    assert step_seconds({"reward/mean": 1.0}) is None


def test_plain_lines_are_aligned_and_missing_metrics_left_out() -> None:
    clock, stream = _Clock(), io.StringIO()
    view = PlainView(_COLUMNS, Pace(total_steps=200, start_step=8, clock=clock), 80, stream)
    clock.now = 3.0
    view.log(9, {"reward/mean": -0.5, "rollout/tokens_per_second": 950.0, "time/generate": 1.9, "time/train": 0.1, "time/step": 2.5})
    clock.now = 6.0
    view.log(10, {"reward/mean": 0.25, "validation/accuracy": 0.5, "rollout/tokens_per_second": 1234.0, "time/step": 2.5})
    clock.now = 9.0
    view.log(11, {"reward/mean": 0.25, "rollout/tokens_per_second": 12345.0, "time/step": 2.5})
    clock.now = 12.0
    view.log(12, {})  # without a time of its own: the clock's
    assert stream.getvalue().splitlines() == [
        "step   9/200  reward -0.50  950 tok/s  2.5 s  (generate 1.9 s, train 100 ms)  ETA 9m33s",
        "step  10/200  reward  0.25  accuracy 50.0%  1.2k tok/s  2.5 s  ETA 9m30s",
        "step  11/200  reward  0.25                  12.3k tok/s  2.5 s  ETA 9m27s",
        "step  12/200                                             3.0 s  ETA 9m24s",
    ]


def _open(progress: Progress, stream: io.StringIO):
    config = LoggingConfig(progress=progress)
    return open_view(config, columns=_COLUMNS, title="ppo", total_steps=20, start_step=0, stream=stream)


def test_auto_is_plain_in_a_batch_log_and_off_is_silent() -> None:
    stream = io.StringIO()
    view = _open(Progress.auto, stream)
    assert isinstance(view, PlainView)
    off = _open(Progress.off, stream)
    off.log(1, {"reward/mean": 1.0})
    off.note("hello")
    off.close()
    assert stream.getvalue() == ""


def test_live_view_shows_metrics_phases_samples_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "50")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    view = _open(Progress.live, stream)
    view.note("[bold]resumed[/bold] at step 3")
    for step in range(1, 9):
        view.log(step, {"reward/mean": step / 10, "rollout/tokens_per_second": 1234.0, "time/generate": 3.0, "time/train": 1.0})
    view.table(8, [SampleRow(prompt="2+2=", response="4", reward=1.0, finish_reason=FinishReason.stop)])
    view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    frame = text[text.rindex("ppo") :]  # the last one
    assert "[bold]resumed[/bold] at step 3" in text
    assert re.search(r"step 8/20\s+40%", frame)
    assert re.search(r"reward\s+0\.80\s+▁▂▃▄▅▆▇█\s+best 0\.80", frame)
    assert re.search(r"1\.2k tok/s\s+▄▄▄▄▄▄▄▄", frame)
    assert re.search(r"generate\s+3\.0 s\s+█{14}\s", frame)  # three quarters of 18 characters, rounded
    assert re.search(r"train\s+1\.0 s\s+█{4}\s", frame)
    assert re.search(r"1\.00\s+stop\s+2\+2=\s+4", frame)
    assert "never" not in frame
