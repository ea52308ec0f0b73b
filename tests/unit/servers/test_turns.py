"""Components that share a device take turns: the lock between them, what a server does with it, and the one that trains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.errors import ServerError, ServerTimeout
from aligner.parallel.progress import WAIT_FOR_SERVERS, Progress
from aligner.servers.turns import Residence, SharedDevice, Turn


class Model:
    """Notes where it is, and in whose turn it moved."""

    def __init__(self) -> None:
        self.moves: list[str] = []

    def leave_device(self) -> None:
        self.moves.append("leaves")

    def enter_device(self) -> None:
        self.moves.append("comes")


def test_one_component_at_a_time_has_the_turn(tmp_path: Path) -> None:
    actor, critic = Turn(tmp_path / "turn", "actor"), Turn(tmp_path / "turn", "critic")
    assert actor.try_take() and actor.try_take()
    assert not critic.try_take()
    with pytest.raises(ServerTimeout, match=rf"critic waited 0.05 s .* which actor \(pid {os.getpid()}\) has"):
        critic.take(0.05)
    actor.release()
    actor.release()
    critic.take(0.0)
    assert not actor.try_take()


def test_the_turn_of_a_dead_process_is_free(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from aligner.servers.turns import Turn
assert Turn(Path({str(tmp_path / "turn")!r}), "critic").try_take()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -9
    assert (tmp_path / "turn").read_text().startswith("critic")
    assert Turn(tmp_path / "turn", "actor").try_take()


def test_a_child_process_does_not_keep_the_turn(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "turn", "actor")
    assert turn.try_take()
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        turn.release()
        assert Turn(tmp_path / "turn", "critic").try_take()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_server_without_a_turn_stays() -> None:
    model = Model()
    residence = Residence([model])
    assert residence.try_take(0.0) and not residence.takes_turns
    residence.move(True)
    residence.release()
    assert model.moves == []


def test_a_server_waits_for_its_turn(tmp_path: Path) -> None:
    model, other = Model(), Turn(tmp_path / "turn", "actor")
    residence = Residence([model], Turn(tmp_path / "turn", "critic"))
    residence.move(False)
    assert other.try_take() and not residence.try_take(0.05)
    other.release()
    assert residence.try_take(0.0) and not other.try_take()
    residence.move(True)
    residence.move(True)
    residence.move(False)
    residence.release()
    assert model.moves == ["leaves", "comes", "leaves"] and other.try_take()


def shared_device(path: Path) -> tuple[SharedDevice, Model, Progress]:
    model, progress = Model(), Progress()
    device = SharedDevice(Turn(path, "actor"), progress, timeout_seconds=0.05)
    device.take()
    device.holds(model)
    return device, model, progress


@pytest.mark.usefixtures("topology")
def test_the_one_that_trains_gives_its_turn_away(tmp_path: Path) -> None:
    device, model, progress = shared_device(tmp_path / "turn")
    critic = Turn(tmp_path / "turn", "critic")
    assert not critic.try_take()
    with device.given_away():
        assert model.moves == ["leaves"] and progress.snapshot().phase == WAIT_FOR_SERVERS
        assert critic.try_take()
        critic.release()
    assert model.moves == ["leaves", "comes"] and not critic.try_take()
    with pytest.raises(ServerError, match="it is lost"), device.given_away():
        raise ServerError("it is lost")
    assert model.moves[2:] == ["leaves", "comes"]  # for a last checkpoint
    with pytest.raises(ServerTimeout, match="actor waited 0.05 s .* which critic"), device.given_away():
        assert critic.try_take()
