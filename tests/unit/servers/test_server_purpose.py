"""When a server that was started on its own ends: its run is done, or nobody has worked on it for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aligner.servers.health import Purpose


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "actor.json", tmp_path / "done.json"


def beat(actor: Path, number: int) -> None:
    actor.touch()
    os.utime(actor, ns=(number, number))


def test_it_waits_for_an_actor_and_stays_while_one_lives(files: tuple[Path, Path]) -> None:
    actor, done = files
    now = [0.0]
    purpose = Purpose(actor, done, 100.0, clock=lambda: now[0])
    for now[0], heartbeat in ((99.0, 1), (198.0, 2), (297.0, 2)):  # no request all the time
        beat(actor, heartbeat)
        assert purpose.over(now[0]) == ""
    now[0] = 299.0  # the last heartbeat was seen at 198
    reason = "for 100 s there was no request and no actor in the run (server.idle_timeout_seconds)"
    assert purpose.over(idle_seconds=299.0) == reason
    assert purpose.over(idle_seconds=3.0) == ""  # somebody without a registration asks


def test_it_ends_with_the_run(files: tuple[Path, Path]) -> None:
    actor, done = files
    done.write_text("{}")
    purpose = Purpose(actor, done, 100.0)
    assert purpose.over(1.0) == ""  # done long ago: somebody wants the server nevertheless
    os.utime(done, ns=(5, 5))
    assert purpose.over(1.0) == "the run is done (done.json)"
