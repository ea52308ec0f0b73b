"""Asynchronous clients of the critic and reward servers: they satisfy `aligner.protocols.Critic` and `RewardModel`.

Every call returns a future at once; `result()` gives the tensors or raises ServerUnreachable, ServerTimeout or RequestRejected. Nothing is
ever swallowed, and `train` is never sent twice.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from aligner.errors import RequestRejected
from aligner.servers import wire
from aligner.servers.config import ClientConfig
from aligner.servers.lane import Lane, combine
from aligner.servers.link import ServiceLink
from aligner.servers.registry import Registration
from aligner.servers.reward import padded_tokens
from aligner.types import Rollout, TokenBatch, ValueBatch, num_rows, select_rows

CLOSE_SECONDS = 5.0

Texts = Callable[[Rollout], tuple[str, str, str | None]]  # prompt, response, answer


class CriticClient:
    """A critic behind `services_dir`. Values are asked for in parallel; train and save requests go one after the other, in order."""

    def __init__(self, services_dir: Path, *, config: ClientConfig, name: str = "critic") -> None:
        self._config = config
        self._link = ServiceLink(services_dir, name, config, pinned=True)
        self._infer = Lane(f"{name}-infer", config.num_threads)
        self._train = Lane(f"{name}-train", 1)
        atexit.register(self.close)  # a thread that is inside torch while the interpreter goes away aborts the process

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._link.wait_until_ready()

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        """Values float32 [B, S], asked for in pieces of `rows_per_request` rows."""
        rows, piece = num_rows(batch), self._config.rows_per_request
        parts = [select_rows(batch, start, min(start + piece, rows)) for start in range(0, rows, piece)]
        return combine([self._infer.submit(lambda part=part: self._values(part)) for part in parts], torch.cat)

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        """Train on the whole batch in one request; resolves to the critic's metrics."""
        return self._train.submit(lambda: self._trained(wire.TrainRequest(batch=batch, step=step)))

    def save(self, step: int) -> Future[str]:
        """Resolves to the checkpoint's path on the server's machine."""
        return self._train.submit(lambda: self._saved(wire.SaveRequest(step=step)))

    def close(self) -> None:
        """End the threads; calls under way fail with ServerUnreachable. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._link.close()
        self._infer.close(CLOSE_SECONDS)
        self._train.close(CLOSE_SECONDS)

    def _values(self, batch: TokenBatch) -> Tensor:
        arrays = self._link.call_repeatedly(wire.CRITIC_INFER, wire.encode_tokens(batch), self._config.request_timeout_seconds)
        return torch.from_numpy(arrays["values"])

    def _trained(self, request: wire.TrainRequest) -> dict[str, float]:
        arrays = self._link.call_once(wire.CRITIC_TRAIN, wire.encode_train(request), self._config.train_timeout_seconds)
        return wire.decode_trained(arrays).metrics

    def _saved(self, request: wire.SaveRequest) -> str:
        return wire.decode_saved(self._link.call_once(wire.CRITIC_SAVE, wire.encode_save(request), self._config.train_timeout_seconds))


class RewardClient:
    """A reward model or reward function behind `services_dir`.

    `texts(rollout)` gives (prompt, response, answer) for servers that score texts; without it only tokens are sent. `reduce` turns scores
    [B, K] of a model with several attributes into rewards [B].
    """

    def __init__(
        self,
        services_dir: Path,
        *,
        config: ClientConfig,
        name: str = "reward",
        texts: Texts | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._config = config
        self._texts = texts
        self._reduce = reduce
        self._link = ServiceLink(services_dir, name, config, pinned=False)
        self._lane = Lane(f"{name}-score", config.num_threads)
        atexit.register(self.close)

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._link.wait_until_ready()

    def score(self, rollouts: Sequence[Rollout]) -> Future[Tensor]:
        """One float32 reward per rollout, [B], asked for in pieces of `rows_per_request` rows."""
        if not rollouts:
            raise ValueError("RewardClient.score: no rollouts were given")
        piece = self._config.rows_per_request
        parts = [rollouts[start : start + piece] for start in range(0, len(rollouts), piece)]
        return combine([self._lane.submit(lambda part=part: self._scored(part)) for part in parts], torch.cat)

    def close(self) -> None:
        """End the threads; calls under way fail with ServerUnreachable. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._link.close()
        self._lane.close(CLOSE_SECONDS)

    def _scored(self, rollouts: Sequence[Rollout]) -> Tensor:
        texts = None
        if self._texts is not None:
            prompts, responses, answers = zip(*(self._texts(rollout) for rollout in rollouts), strict=True)
            texts = wire.RewardTexts(prompts=list(prompts), responses=list(responses), answers=list(answers))
        request = wire.RewardRequest(batch=padded_tokens([rollout.tokens for rollout in rollouts]), texts=texts)
        arrays = self._link.call_repeatedly(wire.REWARD_MODEL, wire.encode_reward(request), self._config.request_timeout_seconds)
        scores = torch.from_numpy(arrays["rewards"])
        if self._reduce is not None:
            return self._reduce(scores)
        if scores.shape[1] != 1:
            raise RequestRejected(
                f"reward_model: {scores.shape[1]} attributes per row; give RewardClient a `reduce` to make one reward of them"
            )
        return scores[:, 0]
