"""Components that share a device take turns: the lock between them, what a server does with it, and the one that trains."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_jobs import eventually

from aligner.errors import ServerError, ServerTimeout
from aligner.parallel.progress import WAIT_FOR_SERVERS, Progress
from aligner.servers import wire
from aligner.servers.config import RequestLimits
from aligner.servers.intake import Intake, Operation
from aligner.servers.kserve import AnswerError
from aligner.servers.ledger import Ledger
from aligner.servers.server import ControlGroup, _lead_loop
from aligner.servers.turns import Residence, SharedDevice, Turn
from aligner.types import TokenBatch


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
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            Turn(tmp_path / "turn", "critic").try_take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
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


def shared_device(path: Path) -> tuple[SharedDevice, Model, Progress]:
    model, progress = Model(), Progress()
    device = SharedDevice(Turn(path, "actor"), progress, timeout_seconds=0.05)
    device.take()
    device.model = model
    return device, model, progress


@pytest.mark.usefixtures("topology")
def test_a_request_waits_for_the_devices_and_the_server_lives_on(tmp_path: Path) -> None:
    """While another component has them: what does not compute is answered, no-ops go round, and a stop is heard."""
    model, actor, rounds = Model(), Turn(tmp_path / "turn", "actor"), []
    residence = Residence([model], Turn(tmp_path / "turn", "critic"))
    residence.move(False)
    operations = {
        "critic_infer": Operation(endpoint=wire.CRITIC_INFER, handler=lambda _: torch.zeros(1, 2)),
        "critic_status": Operation(endpoint=wire.CRITIC_STATUS, handler=lambda _: Ledger("r").status(), computes=False),
    }
    intake, stop = Intake(operations, RequestLimits(vocab_size=9, max_sequence_length=9)), list[int]()
    config = SimpleNamespace(idle_seconds=0.05)
    parts = {"residence": residence, "progress": Progress(), "config": config}
    service = SimpleNamespace(operations=[*operations.values()], name="critic", purpose=None, **parts)
    pulse = SimpleNamespace(begin=rounds.append, round_done=lambda: None)
    arguments = (service, ControlGroup(5.0), intake, SimpleNamespace(failure=lambda: None), stop, pulse)
    tokens = wire.encode_tokens(TokenBatch(tokens=torch.ones(1, 2, dtype=torch.int64), lengths=torch.tensor([2])))
    assert actor.try_take()
    loop = threading.Thread(target=lambda: _lead_loop(*arguments))
    loop.start()
    try:
        status = intake.submit(wire.CRITIC_STATUS, wire.encode_fields(wire.StatusRequest(run="r")))
        assert status.result(timeout=30)
        values = intake.submit(wire.CRITIC_INFER, tokens)
        before = len(rounds)
        assert eventually(lambda: len(rounds) > before + 3) and not values.done()
        assert model.moves == ["leaves"] and "critic_infer" not in rounds
        actor.release()
        assert values.result(timeout=30)["values"].shape == (1, 2)
        assert eventually(actor.try_take)  # it has nothing more to do
        assert model.moves == ["leaves", "comes", "leaves"]
        waiting = intake.submit(wire.CRITIC_INFER, tokens)
    finally:
        stop.append(signal.SIGTERM)
        loop.join(timeout=30)
    assert not loop.is_alive() and not waiting.done()
    intake.close(AnswerError("stopped", status=503))
    with pytest.raises(AnswerError, match="stopped"):
        waiting.result(timeout=30)


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
