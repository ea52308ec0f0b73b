"""A run that knows the end of its time does not begin a step that it could not save."""

from __future__ import annotations

import pytest

from aligner.loop.loop import TimeBudget, seconds_left


class Time:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Time:
    made = Time()
    monkeypatch.setattr("aligner.loop.loop.time", made)
    return made


def test_a_step_and_a_save_must_fit(clock: Time) -> None:
    budget = TimeBudget(seconds_left({"ALIGNER_END_TIME": "1300"}), clock=clock.monotonic)
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


def test_the_longest_of_the_last_steps_counts(clock: Time) -> None:
    budget = TimeBudget(lambda: 1e9, clock=clock.monotonic)
    for seconds in (100, 1, 2, 3, 4, 5, 6, 7, 8):  # the first is forgotten: it compiled and warmed up
        with budget.step():
            clock.now += seconds
    assert budget.needed_seconds() == pytest.approx(1.2 * 16)
