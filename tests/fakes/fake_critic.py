"""A critic whose whole model is one integer, behind a service that is real, on servers and disks that are not: they die as they are told.

A lost, doubled or misplaced update gives another integer for good: w -> (31 w + sum of the tokens) mod a prime.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from aligner.errors import RequestRejected, ServerTimeout, ServerUnreachable
from aligner.protocols import Loss
from aligner.servers import wire
from aligner.servers.config import RequestLimits
from aligner.servers.intake import Operation
from aligner.servers.ledger import Ledger, Refused
from aligner.servers.link import RequestRefused, Server
from aligner.servers.payloads import SaveRequest
from aligner.servers.registry import Registration, ServiceState, make_registration
from aligner.servers.services import CriticService
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import TokenBatch, ValueBatch

PRIME = 1_000_003
LIMITS = RequestLimits(vocab_size=1000, max_sequence_length=8)
Arrays = dict[str, np.ndarray]


class Killed(Exception):
    """The server's process is gone."""


def updated(weight: int, batch: ValueBatch) -> int:
    """The weight after one training on the batch."""
    return (31 * weight + int(batch.tokens.sum())) % PRIME


def value_batch(*tokens: int) -> ValueBatch:
    """One row, that token 0 begins; its last token is trained on."""
    tokens = (0, *tokens)
    size = len(tokens)
    mask = torch.tensor([[False] * (size - 1) + [True]])
    zeros = torch.zeros(1, size)
    return ValueBatch(tokens=torch.tensor([tokens]), lengths=torch.tensor([size]), loss_mask=mask, old_values=zeros, returns=zeros)


def token_batch(*tokens: int) -> TokenBatch:
    return TokenBatch(tokens=torch.tensor([tokens]), lengths=torch.tensor([len(tokens)]))


class IntegerModel:
    """The value of every token is the weight."""

    def __init__(self, weight: int = 1) -> None:
        self.weight = weight

    def values(self, batch: TokenBatch) -> torch.Tensor:
        return torch.full(batch.tokens.shape, float(self.weight))

    def train_step(self, batch: ValueBatch, loss: Loss) -> dict[str, Metric]:
        self.weight = updated(self.weight, batch)
        return {"value/loss": Mean(total=float(self.weight), count=1)}


@dataclass
class Disk:
    """What survives a server: the critic's checkpoints (weight and ledger), and the steps that the policy has one of."""

    critics: dict[int, tuple[int, dict]] = field(default_factory=dict)
    policies: set[int] = field(default_factory=set)

    def newest_pair(self) -> int:
        return max(self.policies & self.critics.keys(), default=0)


class FakeServer:
    """One incarnation, from the newest pair on the disk. `before_save` may raise Killed in the middle of a save."""

    def __init__(self, disk: Disk, run: str = "run", *, accept_gap: bool = False) -> None:
        self.disk = disk
        self.incarnation = uuid.uuid4().hex
        self.before_save: Callable[[], None] = lambda: None
        self.model = IntegerModel()
        self.ledger = Ledger(run, accepts_gap=accept_gap)
        self.begun: dict[int, tuple[int, dict]] = {}
        step = disk.newest_pair()
        if step:
            self.model.weight, state = disk.critics[step]
            self.ledger.load_state(state, checkpoint_step=step)
        service = CriticService(self.model, lambda outputs, batch: None, self.ledger, mini_batch_size=8, num_epochs=1, save=self._save)
        self._operations: dict[str, Operation] = {operation.endpoint.name: operation for operation in service.operations()}

    def handle(self, name: str, arrays: Arrays) -> Arrays:
        """What the server's loop does with a request. Raises Refused, ValueError or Killed."""
        operation = self._operations[name]
        payload = operation.endpoint.payload(arrays, LIMITS)
        return operation.endpoint.encode(payload, operation.handler(payload))

    def _save(self, request: SaveRequest) -> str:
        """As jobs.checkpointing.CriticCheckpointer does: begun now and complete later, or both at once."""
        mark = request.after
        begun = self.begun.get(request.step)
        if begun is None or begun[1]["mark"] != mark:
            complete = self.disk.critics.get(request.step)
            if complete is not None and complete[1]["mark"] == mark:
                return f"step {request.step}"
            self.ledger.check_after(mark)
            begun = (self.model.weight, self.ledger.state())
        self.begun[request.step] = begun
        self.before_save()
        if request.wait:
            self.disk.critics[request.step] = self.begun.pop(request.step)
        return f"step {request.step}"


class AlwaysAlive:
    def problem(self) -> None:
        return None


class FakeLink:
    """`aligner.servers.link.ServiceLink` to whatever server is there now. `fate(moment, endpoint)` says "die" or "twice" where it likes.

    A server that dies is replaced at once by `restart()`. The moments are "before" and "after" the server has done what it is asked, and
    "saving".
    """

    def __init__(self, restart: Callable[[], FakeServer], fate: Callable[[str, str], str] = lambda moment, endpoint: "") -> None:
        self.restart = restart
        self.fate = fate
        self.server: FakeServer | None = restart()
        self.num_deaths = 0
        self.requests: list[str] = []
        self.is_closed = False
        self.is_gone = False
        self._known = make_registration(name="critic", role="critic", num_ranks=1)

    def find(self, timeout_seconds: float) -> Server:
        if self.server is None:
            raise ServerUnreachable("critic: no server has registered there")
        return Server(self.registration(), AlwaysAlive())

    def registration(self) -> Registration:
        return replace(self._known, incarnation=self.server.incarnation, state=ServiceState.ready, url="http://fake:1")

    def pause(self, seconds: float) -> None:
        """Time does not pass here."""

    def close(self) -> None:
        self.is_closed = True

    def call(self, server: Server, endpoint: wire.Endpoint, inputs: Arrays, timeout_seconds: float) -> Arrays:
        name, there = endpoint.name, self.server
        if there is None or there.incarnation != server.registration.incarnation:
            raise ServerUnreachable("critic: its process no longer exists")
        self.requests.append(name)
        there.before_save = lambda: self._perhaps("saving", name)
        try:
            self._perhaps("before", name)
            answer = there.handle(name, inputs)
            if self.fate("twice", name) == "twice":
                assert same(there.handle(name, inputs), answer)
            self._perhaps("after", name)
            return answer
        except Killed as error:
            self.num_deaths += 1
            self.server = self.restart()
            raise ServerUnreachable(f"{name}: the connection broke") from error
        except Refused as refused:
            raise RequestRefused(str(refused)) from refused
        except ValueError as error:
            raise RequestRejected(str(error)) from error

    def _perhaps(self, moment: str, name: str) -> None:
        fate = self.fate(moment, name)
        if fate == "die":
            raise Killed
        if fate == "silence":
            raise ServerTimeout(f"{name}: no answer")


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
