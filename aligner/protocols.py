"""What the algorithms ask of the parts they are given. Local objects and clients of servers satisfy the same protocols.

Global view: the methods of `Policy` take and return the *whole* batch on every rank. Which rows a data-parallel replica computes, and how
results come back together, is the implementation's business, so an algorithm never sees a layout. All methods of `Policy` and
`RolloutEngine` are collective: every rank of the component calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from aligner.telemetry.metrics import Metric
from aligner.types import Batch, LossOutput, MaskedBatch, Prompt, Rollout, SamplingConfig, Scores, TokenBatch, TokenOutputs, ValueBatch

BatchT = TypeVar("BatchT", bound=Batch)
Loss = Callable[[TokenOutputs, BatchT], LossOutput]  # called with one micro-batch; hyper-parameters are bound by functools.partial


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """A loss besides that of an optimizer step: `coef` times its sum over its whole batch / its count there is added to the step's. Of a
    `batch` of its own, of which a policy's log-probs are at temperature 1; None: of the step's own, from the same pass."""

    batch: Batch | None
    loss: Loss[Any]
    coef: float


class Trainable(Protocol):
    """A model with an optimizer."""

    def train_step(self, batch: BatchT, loss: Loss[BatchT], added: Sequence[Added] = ()) -> dict[str, Metric]:
        """One optimizer step over the whole batch and those `added`. Returns the losses' metrics (reduced over ranks) and `optim/*`."""


class Policy(Trainable, Protocol):
    """A language model."""

    @property
    def version(self) -> int:
        """How many optimizer steps made these weights."""

    temperature: float  # the sampling temperature; it divides the logits of every log-prob that this policy gives

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """log pi of the tokens in `loss_mask`, float32 [B, S] on the CPU, 0 elsewhere; no gradient, no dropout."""

    def per_token(self, batch: MaskedBatch, *names: str) -> dict[str, Tensor]:
        """What one pass gives of the tokens in `loss_mask`, as in `logprobs`: `logprobs`, `entropy` (in nats, of the distributions which
        they are of) and, of a policy with a head of values, the `values` of the states in which they were chosen."""

    def sleep(self) -> None:
        """Move what only training needs out of the device's memory until the next `train_step`, where the configuration asks for it."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream of (HF name, full unsharded tensor); collective; ranks other than 0 may receive the same tensors."""


class Reference(Protocol):
    """A frozen policy that the trained one is compared with."""

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """As `Policy.logprobs`."""


class Teacher(Reference, Protocol):
    """A frozen policy that another one learns from."""

    def topk(self, batch: MaskedBatch, k: int, *, below: int) -> tuple[Tensor, Tensor]:
        """As `aligner.models.training.policy.MegatronPolicy.topk`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Which of a rollout engine's replicas this rank belongs to. They differ from training's data-parallel ones: every rank generates."""

    index: int = 0
    count: int = 1
    is_leader: bool = True  # on the one rank of each replica that speaks for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What follows a turn of the policy: the tokens that the environment puts behind it, unless the episode is done."""

    tokens: tuple[int, ...] = ()
    images: tuple[str, ...] = ()  # the digests of the images in these tokens' slots
    done: bool = False
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False  # the environment did: the episode ends without a reward


class Exchange(Protocol):
    """The conversations of one generation on one replica. Used on its leading rank, by one thread."""

    def say(self, episode: int, prompt: Prompt, tokens: Sequence[int], *, number: int, is_cut: bool, is_last: bool) -> None:
        """The policy's turn `number` (from 1) in an episode has ended; returns at once. `is_cut`: at the length that was left; `is_last`:
        whatever the reply is, no turn follows. One turn of an episode at a time."""

    def hear(self, wait_seconds: float) -> list[tuple[int, Reply]]:
        """Replies since the last call, by episode; waits at most `wait_seconds` for the first. Raises if one failed or is overdue."""

    def close(self) -> None:
        """Nobody waits any more for what is under way."""


class FollowUp(Protocol):
    """Whom the policy talks to, turn by turn: an environment. One object for all generations of a process."""

    max_turns: int  # of the policy, in one episode

    def open(self) -> Exchange:
        """For one generation."""


class RolloutEngine(Protocol):
    """Samples responses from the policy's current weights. Collective: every rank calls every method."""

    replica: Replica

    def refit(self, version: int) -> None:
        """Make the policy's current weights (optimizer step `version`) the ones that are sampled from, from `wake` on where it sleeps.

        Raises EngineError on every rank where it fails on any; then nothing is generated until another refit succeeds.
        """

    def sleep(self) -> None:
        """Give back device memory until `wake`, where the configuration asks for it. For the time between two generations."""

    def wake(self) -> None:
        """Be ready to generate, with the policy's weights of now; does nothing where the engine is awake. Raises as `refit` does."""

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One response per (prompt, seed), each sampled by one replica: yields what this rank's replica finishes, as it ends, in any order.

        Every rank passes the whole lists and consumes its iterator; no rank waits for another replica here. `sampling` replaces the
        engine's own settings for this call (validation decodes greedily, say). Where the engine talks with an environment, a response is a
        whole episode, and the leading rank of each replica alone is given them.
        """

    def shutdown(self) -> None:
        """End the engine for good; may be called twice. Each rank ends its own part."""


class Critic(Protocol):
    """The value model, wherever it lives. Calls return at once; the future's `result()` raises what went wrong.

    Values are awaited before the next training, and training before the next values. One rank trains and saves; it has the `mark` of the
    training that it sent last, which an actor's checkpoint keeps, and the others `follow` it.
    """

    @property
    def mark(self) -> str:
        """Names the last training and all before it."""

    def resume(self, mark: str) -> None:
        """Continue after the training that `mark` names; on the rank that trains. Raises ServerError where the critic has another past."""

    def follow(self, mark: str) -> None:
        """From now on the critic of this mark is asked for values."""

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        """Values float32 [B, S] (aligned with the token chosen in that state; padding 0)."""

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        """Train on the rollouts of `step`; resolves to the critic's metrics."""

    def begin_save(self, step: int) -> Future[None]:
        """Begin a checkpoint for `step`; resolves when the critic may be trained on."""

    def save(self, step: int) -> Future[str]:
        """Complete the checkpoint for `step`, begun or not; resolves to its path."""

    def checkpointed(self, step: int) -> None:
        """The critic's and the policy's checkpoints of `step` are complete."""

    def close(self) -> None: ...


class RewardModel(Protocol):
    """Anything that scores responses: a reward model behind a server, or Python functions."""

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """One reward per rollout, what it was made of, and whether there is one."""

    def close(self) -> None: ...
