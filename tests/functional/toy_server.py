"""A critic or reward server around a model small enough to compute by hand, for test_servers_*.py. Also runs as several gloo ranks.

"values" is a critic with `critic_infer` and `critic_status` only, which starts sooner. The critic's value of a token is `weight * token`;
one train step adds 1 to the weight. Special tokens make it misbehave: 66: the last rank raises; 77: the last rank raises while the others
wait for it in a collective; 88: sleep for 60 s.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.protocols import Loss
from aligner.servers.config import RequestLimits, ServerConfig, Transport
from aligner.servers.ledger import Ledger
from aligner.servers.server import Service, serve
from aligner.servers.services import CriticService, FunctionRewardService
from aligner.telemetry.metrics import Mean, Metric, Sum
from aligner.types import LossOutput, TokenBatch, TokenOutputs, ValueBatch

RUN = "toy"


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["critic", "values", "reward"])
    parser.add_argument("services_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--transport", default=Transport.auto.value)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if options.kind != "reward":
        service = CriticService(
            ToyCritic(),
            squared_error,
            Ledger(RUN),
            mini_batch_size=2,
            num_epochs=1,
            save=lambda request: str(options.services_dir / f"step-{request.step}"),
        )
    else:
        service = FunctionRewardService(letters)
    served = Service(
        name="reward" if options.kind == "reward" else "critic",
        operations=[service.operations()[0], service.operations()[3]] if options.kind == "values" else service.operations(),
        config=ServerConfig(
            transport=Transport(options.transport), port=options.port, failure_grace_seconds=2.0, idle_seconds=0.5, heartbeat_seconds=0.5
        ),
        limits=RequestLimits(vocab_size=100, max_sequence_length=16),
        services_dir=options.services_dir,
        secret=options.services_dir.parent / "secret",
    )
    serve(served)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
