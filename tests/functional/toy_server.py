"""A critic or reward server around a model small enough to compute by hand, in processes of its own, also as several gloo ranks.

"values" is a critic with `critic_infer` and `critic_status` only, which starts sooner. The critic's value of a token is `weight * token`;
one train step adds 1 to the weight. Special tokens make it misbehave: 66: the last rank raises; 77: the last rank raises while the others
wait for it in a collective; 88: sleep for 60 s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from preloaded import preloaded

from aligner.protocols import Loss
from aligner.servers.config import RequestLimits, ServerConfig, Transport
from aligner.servers.ledger import Ledger
from aligner.servers.server import Service, serve
from aligner.servers.services import CriticService, FunctionRewardService
from aligner.telemetry.metrics import Mean, Metric, Sum
from aligner.types import LossOutput, TokenBatch, TokenOutputs, ValueBatch

RUN = "toy"
TRANSPORTS = (pytest.param("pytriton", marks=pytest.mark.pytriton), "http")


class ToyCritic:
    """All ranks hold the same weight and check, by a collective, that they agree on it."""

    def __init__(self) -> None:
        self.weight = torch.tensor(2.0)

    def values(self, batch: TokenBatch) -> torch.Tensor:
        self._misbehave(batch.tokens)
        values = batch.tokens * self._agreed_weight()
        if (batch.tokens == 66).any() and self._is_last_rank():
            raise ArithmeticError("token 66 cannot be valued")
        return values

    def train_step(self, batch: ValueBatch, loss: Loss) -> dict[str, Metric]:
        self._misbehave(batch.tokens)
        output = loss(TokenOutputs(values=batch.tokens * self._agreed_weight()), batch)
        self.weight += 1
        return {**output.metrics, "optim/steps": Sum(total=1)}

    def _agreed_weight(self) -> torch.Tensor:
        total = self.weight.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total

    def _is_last_rank(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1

    def _misbehave(self, tokens: torch.Tensor) -> None:
        if (tokens == 77).any() and self._is_last_rank():
            raise ArithmeticError("token 77 cannot be valued")
        if (tokens == 88).any():
            time.sleep(60)


def squared_error(outputs: TokenOutputs, batch: ValueBatch) -> LossOutput:
    """Sum of (value - return)^2 over the mask."""
    total = ((outputs.values - batch.returns).square() * batch.loss_mask).sum()
    count = batch.loss_mask.sum()
    return LossOutput(total=total, count=count, metrics={"value/loss": Mean(total=total, count=count)})


def letters(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """1 for the answer, else 0.1 for each letter of the response."""
    return [1.0 if response == answer else 0.1 * len(response) for response, answer in zip(responses, answers, strict=True)]


def serve_toy(kind: str, services_dir: Path, port: int, transport: str) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if kind == "reward":
        operations = FunctionRewardService(letters).operations()
    else:
        critic, save = {"mini_batch_size": 2, "num_epochs": 1}, (lambda request: str(services_dir / f"step-{request.step}"))
        operations = CriticService(ToyCritic(), squared_error, Ledger(RUN), save=save, **critic).operations()
    seconds = {"failure_grace_seconds": 2.0, "idle_seconds": 0.5, "heartbeat_seconds": 0.5}
    served = Service(
        name="reward" if kind == "reward" else "critic",
        operations=[operations[0], operations[3]] if kind == "values" else operations,
        config=ServerConfig(transport=Transport(transport), port=port, **seconds),
        limits=RequestLimits(vocab_size=100, max_sequence_length=16),
        services_dir=services_dir,
        secret=services_dir.parent / "secret",
    )
    serve(served)
    if dist.is_initialized():
        dist.destroy_process_group()


class ToyServer:
    """The ranks of one toy server; `log(rank)` is what a rank printed."""

    def __init__(self, kind: str, services_dir: Path, num_ranks: int, transport: str, port: int, environment: Mapping[str, str]) -> None:
        self.services_dir = services_dir
        rendezvous = ranks.free_port()
        folder = services_dir.parent / f"{kind}.{rendezvous}"
        folder.mkdir(parents=True)
        ranks.ask(folder, serve_toy, (kind, services_dir, port, transport))
        self._logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous)} if num_ranks > 1 else {}
        common = {**os.environ, **world, "PYTHONPATH": str(ranks.TESTS.parent), "OMP_NUM_THREADS": "1", **environment}
        command = [ranks.__file__, str(folder)]
        self.ranks = [preloaded().start(command, common | {"RANK": str(rank)}, log, Path.cwd()) for rank, log in enumerate(self._logs)]

    def log(self, rank: int = 0) -> str:
        return self._logs[rank].read_text()

    def exit_codes(self, timeout_seconds: float = 40.0) -> list[int]:
        return [rank.wait(timeout=timeout_seconds) for rank in self.ranks]

    def end(self) -> None:
        """Ask the ranks that still run to stop; kill those that do not within 20 s."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)
        for rank in self.ranks:
            try:
                rank.wait(timeout=20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


@contextmanager
def toy_server(
    kind: str,
    services_dir: Path,
    *,
    num_ranks: int = 1,
    transport: str = "auto",
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ToyServer]:
    server = ToyServer(kind, services_dir, num_ranks, transport, port, environment or {})
    try:
        yield server
    finally:
        server.end()
