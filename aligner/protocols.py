"""What the algorithms ask of the parts they are given. Local objects and PyTriton clients satisfy the same protocols.

Global view: the methods of `Policy` and `RolloutEngine` take and return the *whole* batch on every rank. Which rows a data-parallel
replica computes, and how results come back together, is the implementation's business, so an algorithm never sees a layout. All their
methods are collective: every rank of the component calls them, in the same order, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from aligner.metrics import Metric
from aligner.types import Batch, LossOutput, MaskedBatch, Prompt, Rollout, SamplingConfig, TokenBatch, TokenOutputs, ValueBatch

Loss = Callable[[TokenOutputs, Batch], LossOutput]  # called with one micro-batch; hyper-parameters are bound by functools.partial


class Trainable(Protocol):
    """A model with an optimizer."""

    def train_step(self, batch: Batch, loss: Loss) -> dict[str, Metric]:
        """One optimizer step over the whole batch. Returns the loss's metrics (reduced over ranks) and `optim/*`."""


class Policy(Trainable, Protocol):
    """A language model."""

    version: int  # how many optimizer steps made these weights

    temperature: float  # the sampling temperature; it divides the logits of every log-prob that this policy gives

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """log pi of the tokens in `loss_mask`, float32 [B, S] on the CPU, 0 elsewhere; no gradient, no dropout."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream of (HF name, full unsharded tensor); collective; ranks other than 0 may receive the same tensors."""


class RolloutEngine(Protocol):
    """Samples responses from the policy's current weights. Collective: every rank calls every method."""

    def refit(self, version: int) -> None:
        """Make the policy's current weights (optimizer step `version`) the ones that are sampled from."""

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One response per (prompt, seed); *local* to a data-parallel replica; yields finished ones as they end, in any order.

        `sampling` replaces the engine's own settings for this call (validation decodes greedily, say).
        """


class Critic(Protocol):
    """The value model, wherever it lives. Calls return at once; the future's `result()` raises what went wrong."""

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        """Values float32 [B, S] (aligned with the token chosen in that state; padding 0)."""

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        """Train on the rollouts of `step`; resolves to the critic's metrics."""

    def save(self, step: int) -> Future[str]:
        """Write a checkpoint for `step`; resolves to its path."""

    def close(self) -> None: ...


class RewardModel(Protocol):
    """Anything that scores responses: a reward model behind a server, or Python functions."""

    def score(self, rollouts: Sequence[Rollout]) -> Future[Tensor]:
        """One float32 reward per rollout, [B]."""

    def close(self) -> None: ...
