"""When a component that does nothing is stuck, and when it waits for a server that has a deadline of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.parallel.progress import IDLE, GroupInfo, Progress
from aligner.parallel.watch import Place, Watch, clear_last_report

WORLD = GroupInfo("0", "world", (0, 1))
STALL_SECONDS = 30.0


class Still(Progress):
    """Has done nothing for `seconds`."""

    def __init__(self, seconds: float, phase: str) -> None:
        super().__init__()
        self.seconds = seconds
        self.enter_phase(phase)

    @property
    def still_seconds(self) -> float:
        return self.seconds


@pytest.fixture
def watch(tmp_path: Path):
    """`watch(component, rank, seconds, phase)`: its health is on disk."""

    def make(component: str, rank: int, seconds: float, phase: str = "train", *, attempt: str = "7.0", inside: bool = False) -> Watch:
        servers = ("critic", "reward") if component == "actor" else ()
        place = Place(
            component=component, rank=rank, world_size=2, host="n0", incarnation=f"start of {component}", attempt=attempt, servers=servers
        )
        progress = Still(seconds, phase)
        if inside:
            progress.enter("broadcast", WORLD)
        made = Watch(progress, place, health=tmp_path, stacks=tmp_path / "stacks", stall_seconds=STALL_SECONDS)
        made.record()
        return made

    return make


def test_no_progress_for_the_time_allowed(watch):
    assert not watch("actor", 0, 29).has_stalled()
    assert watch("actor", 0, 31).has_stalled()


def test_a_busy_server_is_waited_for_and_a_stuck_or_idle_one_is_not(watch):
    actor = watch("actor", 0, 31, "save checkpoint")
    watch("critic", 0, 20, "critic_save")
    assert not actor.has_stalled()
    watch("critic", 0, 31, "critic_save")
    assert not actor.has_stalled()  # the critic is given the time to name itself
    watch("critic", 0, 60, "critic_save")
    assert actor.has_stalled()
    watch("critic", 0, 0, IDLE)
    assert actor.has_stalled()
    watch("critic", 0, 0, "critic_save", attempt="6.0")  # of a start of the run that is over
    assert actor.has_stalled()


def test_a_server_waits_for_nobody(watch):
    critic = watch("critic", 0, 31, "critic_train")
    watch("actor", 0, 0)
    assert critic.has_stalled()


def test_a_rank_that_waits_for_a_server_excuses_the_others(watch):
    other = watch("actor", 1, 31, "critic_wait", inside=True)
    watch("actor", 0, 31, "critic_wait")
    assert not other.has_stalled()
    watch("actor", 0, 31, "critic_wait", inside=True)  # it has its answer: now it waits for another rank
    assert other.has_stalled()


def test_a_file_that_is_not_whole_is_passed_over(watch, tmp_path):
    (tmp_path / "critic.0.json").write_text('{"place": {')
    assert watch("actor", 0, 31).has_stalled()
    assert json.loads((tmp_path / "actor.0.json").read_text())["record"]["phase"] == "train"


def test_an_earlier_report_is_put_aside(tmp_path):
    (tmp_path / "actor.report.txt").write_text("old")
    (tmp_path / ".actor.abc.request").write_text("rank 0")
    (tmp_path / "critic.report.txt").write_text("of another component")
    clear_last_report(tmp_path, "actor")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1:] == ["critic.report.txt"] and names[0].startswith("actor.report.2")
