"""The alarm over the gap: when it rings, and that a run which it ends has its step saved."""

from __future__ import annotations

import math

import pytest
from fake_parts import Recorder

from aligner.errors import ConfigError, RunHalted
from aligner.loop.learnt import GapAlarm
from aligner.models.training.guard import GapStatistic, LogprobGapConfig

GAP = "rollout/logprob_gap"


def rings(values, *, name: str = GAP, **config) -> str:
    """One character per step: `.` nothing, `w` a warning, `s` a stop."""
    alarm = GapAlarm(LogprobGapConfig(**config), command="aligner gap runs/x")
    verdicts = [alarm.judge(step, {name: value}) for step, value in enumerate(values, start=1)]
    return "".join("s" if verdict.halt else "w" if verdict.note else "." for verdict in verdicts)


def test_when_it_rings() -> None:
    values = [0.1, 0.3, 0.6, 0.3, 0.1, 0.3, 0.9, 0.9, math.nan]
    assert rings(values) == "........."  # off
    assert rings(values, warn=0.2, repeat_every=1) == ".www.wwww"
    assert rings(values, warn=0.2, repeat_every=2) == ".w.w.w.w."
    assert rings(values, warn=0.2, repeat_every=50) == ".w......."
    assert rings(values, warn=0.2, patience=3, repeat_every=1) == "...w...ww"
    assert rings(values, stop=0.5) == "..s...sss"
    assert rings(values, stop=0.5, patience=2) == ".......ss"
    assert rings(values, warn=0.2, stop=0.5, repeat_every=1) == ".wsw.wsss"
    assert rings([0.5, 0.5000001], stop=0.5) == ".s"


def test_what_it_says() -> None:
    alarm = GapAlarm(LogprobGapConfig(stop=0.25, patience=2, statistic=GapStatistic.p99), command="aligner gap runs/x")
    alarm.judge(6, {f"{GAP}_p99": 0.3})
    assert alarm.judge(7, {f"{GAP}_p99": 0.4}).halt == (
        "the engine's log-probs are not the trainer's: rollout/logprob_gap_p99=0.4 in step 7 is above guard.logprob_gap.stop=0.25 "
        "(2 steps in a row). Which layer and operation it comes from: aligner gap runs/x"
    )


def test_steps_that_it_cannot_watch_are_said_once() -> None:
    alarm = GapAlarm(LogprobGapConfig(warn=0.25), command="")
    assert alarm.judge(1, {"x": 1.0}).note == "warning: step 1 reports no rollout/logprob_gap: guard.logprob_gap does not watch such steps"
    assert not alarm.judge(2, {"x": 1.0}).note and alarm.judge(3, {GAP: 0.3}).note


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"warn": -0.1}, "warn=-0.1"),
        ({"stop": math.inf}, "stop=inf"),
        ({"warn": 0.2, "stop": 0.2}, "stop=0.2: must be above warn=0.2"),
        ({"patience": 0}, "patience=0"),
        ({"repeat_every": 0}, "repeat_every=0"),
    ],
)
def test_bad_settings_are_named(settings, named) -> None:
    with pytest.raises(ConfigError, match=rf"guard\.logprob_gap\.{named}"):
        LogprobGapConfig(**settings)


@pytest.mark.usefixtures("topology")
def test_a_run_that_it_ends_has_the_step_logged_and_saved_as_a_pair() -> None:
    made = Recorder()
    made.metric, made.background = GAP, True
    alarm = GapAlarm(LogprobGapConfig(warn=1.5, stop=2.5), command="aligner gap runs/x")
    with pytest.raises(RunHalted, match=r"in step 3 is above guard\.logprob_gap\.stop=2\.5"):
        made.run(parts={"alarms": [alarm]}, max_steps=9)
    assert made.events[-5:] == ["step 3", "log 3", "finish", "save 3 3", "wait 3"] and made.on_disk == 3
    assert [note.split(":")[0] for note in made.notes] == ["warning"]
