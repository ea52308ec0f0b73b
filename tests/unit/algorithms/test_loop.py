"""The training loop with an algorithm, a checkpointer and a reporter that write down what happens."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from fake_parts import Recorder, raises

from aligner.data.order import EpochSampler
from aligner.errors import AlignerError, CheckpointError, ConfigError, ServerUnreachable
from aligner.loop.loop import BY_TIME, TimeBudget, seconds_left
from aligner.run.settings import LoopConfig

pytestmark = pytest.mark.usefixtures("topology")


def test_steps_and_saves() -> None:
    recorder = Recorder()
    assert recorder.run(max_steps=5, save_every=2) == 5
    # What a step left running is awaited before a checkpoint; the last step is saved although it is odd.
    assert recorder.events == [
        *("open 0", "step 1", "log 1", "step 2", "log 2", "finish", "save 2 2", "step 3", "log 3", "step 4", "log 4"),
        *("finish", "save 4 4", "step 5", "log 5", "finish", "save 5 5"),
    ]
    assert recorder.logged[3]["x"] == 3.0
    assert recorder.logged[3].keys() == {"x", "time/work", "time/step"}
    assert 0 <= recorder.logged[3]["time/work"] <= recorder.logged[3]["time/step"]


def test_resume_goes_on_with_the_next_step() -> None:
    recorder = Recorder(start=(3, {"kl_coef": 0.1}))
    assert recorder.run(max_steps=5, validate_first=True) == 5
    assert recorder.events[:4] == ["load {'kl_coef': 0.1}", "open 3", "step 4", "log 4"]  # and no validation before it
    assert recorder.notes == ["resumed after step 3"]


def test_a_finished_run_does_nothing_more() -> None:
    recorder = Recorder(start=(5, {}))
    assert recorder.run(max_steps=5) == 5
    assert recorder.events == ["load {}", "open 5"]


def test_validation_and_tables() -> None:
    recorder = Recorder()
    recorder.run(max_steps=5, validate_every=2, validate_first=True, table_every=3)
    assert recorder.events[1:3] == ["validate", "log 0"]
    assert recorder.logged[0] == {"validation/x": 0.5}
    assert [step for step, metrics in recorder.logged.items() if "validation/x" in metrics] == [0, 2, 4]
    assert [event for event in recorder.events if event.startswith("table")] == ["table 1", "table 3", "table 5"]


def test_a_save_in_the_background_is_awaited_at_the_end() -> None:
    recorder = Recorder()
    recorder.background = True
    recorder.run(max_steps=3, save_every=2)
    assert recorder.events[-4:] == ["log 3", "finish", "save 3 3", "wait 3"]
    assert recorder.on_disk == 3


def test_a_save_in_the_background_that_failed_is_rescued() -> None:
    """Its error comes with a later step: the newest whole step is saved instead, and the error ends the run."""
    recorder = Recorder()
    recorder.background = True

    def fail_at_3() -> None:
        if recorder.updates == 3:
            recorder.under_way = None
            raise CheckpointError("disk full")

    recorder.on_poll = fail_at_3
    with pytest.raises(CheckpointError, match="disk full"):
        recorder.run(max_steps=9, save_every=2)
    assert recorder.events[-3:] == ["step 3", "log 3", "rescue 3 3"]


def test_a_dead_server_does_not_cost_the_save_in_the_background() -> None:
    recorder = Recorder(on_step={3: raises(ServerUnreachable("critic is gone"))})
    recorder.background = True
    with pytest.raises(ServerUnreachable):
        recorder.run(max_steps=9, save_every=2)
    assert recorder.events[-2:] == ["save 2 2", "step 3"]
    assert recorder.on_disk == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_the_step_under_way(number: int) -> None:
    before = signal.getsignal(number)
    recorder = Recorder(on_step={2: lambda: os.kill(os.getpid(), number)})
    assert recorder.run(max_steps=9) == 2
    assert recorder.events[-4:] == ["step 2", "log 2", "finish", "save 2 2"]
    assert recorder.notes == ["stopped by a signal after step 2; saving"]
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_end_the_process_while_it_saves() -> None:
    recorder = Recorder(on_step={2: lambda: os.kill(os.getpid(), signal.SIGUSR1)})
    recorder.on_save = lambda: os.kill(os.getpid(), signal.SIGUSR1)  # by default it would end this process
    assert recorder.run(max_steps=9) == 2
    assert recorder.events[-1] == "save 2 2"


def test_a_run_that_has_no_time_for_another_step_saves_and_stops() -> None:
    recorder = Recorder()
    budget = TimeBudget(lambda: 0.0 if 2 in recorder.logged else 1e9)
    assert recorder.run(parts={"budget": budget}, max_steps=9) == 2
    assert recorder.events[-4:] == ["step 2", "log 2", "finish", "save 2 2"]
    assert recorder.notes == ["stopped before the end of its time after step 2; saving"]


def test_a_dead_server_saves_the_last_whole_step() -> None:
    recorder = Recorder(on_step={3: raises(ServerUnreachable("critic is gone"))})
    with pytest.raises(ServerUnreachable, match="critic is gone"):
        recorder.run(max_steps=9)
    assert recorder.events[-2:] == ["step 3", "rescue 2 2"]
    assert recorder.notes == ["the run cannot continue after step 2 (critic is gone); saving that step"]


@pytest.mark.parametrize(
    ("where", "fields", "last"),
    [
        ("on_finish", {"max_steps": 2}, "finish"),  # of what the step left running
        ("on_save", {"max_steps": 2}, "finish"),  # the critic got the signal too
        ("on_validate", {"max_steps": 9, "validate_every": 2}, "validate"),
    ],
)
def test_an_error_behind_a_whole_step_does_not_cost_it(where: str, fields: dict, last: str) -> None:
    recorder = Recorder()
    setattr(recorder, where, raises(ServerUnreachable("died meanwhile")))
    with pytest.raises(ServerUnreachable):
        recorder.run(**fields)
    assert recorder.events[-2:] == [last, "rescue 2 2"]


def test_nothing_to_rescue() -> None:
    first = Recorder(on_step={1: raises(AlignerError("at once"))})
    with pytest.raises(AlignerError):
        first.run(max_steps=9)
    assert first.events == ["open 0", "step 1"]
    saved = Recorder(on_step={3: raises(AlignerError("right after a save"))})
    with pytest.raises(AlignerError):
        saved.run(max_steps=9, save_every=2)
    assert saved.events[-2:] == ["save 2 2", "step 3"]


def test_weights_of_half_a_step_are_not_saved() -> None:
    recorder = Recorder()

    def half_a_step() -> None:
        recorder.updates += 1
        raise AlignerError("the gradient is not finite")

    recorder.on_step = {3: half_a_step}
    with pytest.raises(AlignerError):
        recorder.run(max_steps=9)
    assert recorder.events[-1] == "step 3"
    assert recorder.notes == [
        "step 3 failed after it had changed the weights (the gradient is not finite); step 2 can no longer be saved",
    ]


def test_a_bug_is_not_rescued() -> None:
    before = signal.getsignal(signal.SIGTERM)
    recorder = Recorder(on_step={3: raises(ZeroDivisionError())})
    with pytest.raises(ZeroDivisionError):
        recorder.run(max_steps=9)
    assert recorder.events[-1] == "step 3"
    assert signal.getsignal(signal.SIGTERM) is before


NUMBERS = ("max_steps", "epochs", "save_minutes", "save_every", "validate_every", "table_every")


@pytest.mark.parametrize("field, value", [(name, -1) for name in NUMBERS])
def test_bad_settings(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"loop.{field}={value}: must"):
        LoopConfig(**{field: value})


class Watch:
    """A clock that each step takes forward."""

    def __init__(self, recorder: Recorder, *seconds: float) -> None:
        self.now = 0.0
        recorder.on_step = {step: lambda taken=taken: self.wait(taken) for step, taken in enumerate(seconds, 1)}

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def saves(recorder: Recorder, watch: Watch, **config: Any) -> list[str]:
    settings = LoopConfig(table_every=0, **config)
    budget = TimeBudget(save_minutes=settings.save_minutes, clock=watch)
    recorder.run(settings, {"budget": budget})
    return [event for event in recorder.events if event.startswith("save")]


def test_a_checkpoint_is_saved_when_it_is_time() -> None:
    """Half an hour after the start, or after the last one, whichever asked for that; by default too."""
    recorder = Recorder()
    assert saves(recorder, Watch(recorder, 1000, 799, 1, 1799, 1, 10), max_steps=6) == ["save 3 3", "save 5 5", "save 6 6"]
    assert recorder.by_time == [3, 5]
    recorder = Recorder()
    assert saves(recorder, Watch(recorder, 60, 60, 60, 60, 61), max_steps=5, save_minutes=2, save_every=3) == [
        *("save 2 2", "save 3 3", "save 5 5"),
    ]
    assert recorder.by_time == [2]  # the others were asked for by their steps
    recorder = Recorder()
    assert saves(recorder, Watch(recorder, 1e6, 1e6), max_steps=3, save_minutes=0) == ["save 3 3"]


def test_a_checkpoint_by_time_comes_when_the_last_one_is_written() -> None:
    """Files that take longer than half an hour do not hold up the training."""
    recorder = Recorder()
    recorder.background = True  # it writes until it is waited for
    assert saves(recorder, Watch(recorder, 1800, 1800, 1800, 1), max_steps=4) == ["save 1 1", "save 4 4"]


def test_the_mark_of_a_checkpoint_by_time_is_no_state_of_the_algorithm() -> None:
    recorder = Recorder(start=(3, {"updates": 3, BY_TIME: True}))
    recorder.run(max_steps=4)
    assert "load {'updates': 3}" in recorder.events


def test_another_length_by_epochs() -> None:
    order = EpochSampler(50, 8, 0)
    assert LoopConfig().max_steps == 100 and LoopConfig().over(order) == LoopConfig()
    assert LoopConfig(epochs=2).max_steps == 0  # until the data are known
    assert LoopConfig(epochs=2).over(order) == LoopConfig(epochs=2, max_steps=13)
    assert LoopConfig(epochs=2, max_steps=13).over(order).epochs == 2
    assert LoopConfig(epochs=2, max_steps=12).over(order) == LoopConfig(max_steps=12)  # sooner
    assert LoopConfig(epochs=2, max_steps=99).over(order) == LoopConfig(epochs=2, max_steps=13)


def test_a_step_and_a_save_must_fit(monkeypatch) -> None:
    """A run that knows the end of its time does not begin a step that it could not save."""
    clock = Watch(Recorder())
    clock.now = 1000
    monkeypatch.setattr("aligner.loop.loop.time", SimpleNamespace(time=clock, monotonic=clock))
    budget = TimeBudget(seconds_left({"ALIGNER_END_TIME": "1300"}), clock=clock)
    assert not budget.is_over()  # nothing is known of the first step
    with budget.step():
        clock.now += 50
    assert budget.needed_seconds() == pytest.approx(120)  # 1.2 times a step of 50 s and a save that is taken to be as long
    with budget.save():
        clock.now += 20
    assert budget.needed_seconds() == pytest.approx(84)
    clock.now = 1216
    assert not budget.is_over()
    clock.now = 1217
    assert budget.is_over()


def test_the_longest_of_the_last_steps_counts() -> None:
    clock = Watch(Recorder())
    budget = TimeBudget(lambda: 1e9, clock=clock)
    for seconds in (100, 1, 2, 3, 4, 5, 6, 7, 8):  # the first is forgotten: it compiled and warmed up
        with budget.step():
            clock.now += seconds
    assert budget.needed_seconds() == pytest.approx(1.2 * 16)
