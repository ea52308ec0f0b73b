"""The critic as PPO uses it, wherever it computes: behind a server (`ServedCritic`), in the actor's processes (`ModelCritic`), or as a head
on the policy (`HeadCritic`).

All have the same loss on the same rows, and report a training in the step after it. The first two train with the same code: the numbers of
a run do not depend on which it is. The last one learns in the policy's updates, by their optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aligner.errors import CheckpointError
from aligner.loop.loop import Clock
from aligner.losses.value import explained_variance, train_on_returns
from aligner.models.training.guard import judge_reply
from aligner.online.collect import ScoredRollouts, token_rows
from aligner.online.task import OnlineTask
from aligner.parallel import platform
from aligner.parallel.collectives import from_rank_0
from aligner.protocols import Added, Critic, Loss, Policy
from aligner.telemetry.metrics import Metric, values as numbers
from aligner.types import RolloutBatch, ValueBatch
from aligner.types.batches import BatchT

if TYPE_CHECKING:
    from aligner.models.training.policy import MegatronValueModel


class CriticRole:
    """Values and their training, step by step. Collective: every rank of the actor calls every method, in the same order. A kind has the
    methods of what it does; the others do nothing.

    `asked` gives values of responses while others are sampled; None: they are computed when all are there.
    """

    asked: Critic | None = None
    added: Sequence[Added] = ()  # losses that every update of the policy has besides its own

    def __init__(self, task: OnlineTask) -> None:
        self.task = task
        self._metrics: dict[str, float] = {}  # of a training that has ended and is not reported yet

    def begin_step(self) -> dict[str, float]:
        """The metrics of the last training, which has ended: values must come from the critic that finished the step before."""
        self.finish()
        metrics, self._metrics = self._metrics, {}
        return metrics

    def evaluate(
        self, collected: ScoredRollouts, batch: RolloutBatch, policy: Policy, clock: Clock
    ) -> tuple[ScoredRollouts, Mapping[str, Tensor]]:
        """The rollouts with their values, and the policy's `logprobs` and `entropy` of their tokens, which are in `batch`."""
        collected = self.values(collected, clock)
        with clock.phase("logprobs"):
            return collected, policy.per_token(batch, "logprobs", "entropy")

    def values(self, collected: ScoredRollouts, clock: Clock) -> ScoredRollouts:
        """The rollouts with their values, which `asked` has given."""
        return collected

    def train(self, batch: ValueBatch, step: int, clock: Clock) -> None:
        """Train on the returns of `step`; may return before it is done."""

    def learnt(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """The metrics of the policy's updates without those of `added`."""
        return metrics

    def end_step(self) -> None:
        """The policy has trained on the same step: what was sent since `begin_step` is part of the state."""

    def finish(self) -> None:
        """Wait for the training under way; raises its error on every rank."""

    def state(self) -> dict[str, Any]:
        """JSON-able state after the last whole step, besides the model."""
        return {"critic_metrics": self._metrics}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._metrics = dict(state["critic_metrics"])

    def _trained(self, metrics: dict[str, float], step: int) -> None:
        """Raises RunHalted or RollBack where the guard does not accept what the training of `step` reports."""
        judge_reply(self.task.guard, metrics, step=step)
        self._report(metrics)

    def _report(self, metrics: dict[str, float]) -> None:
        metrics = metrics | {"explained_variance": explained_variance(metrics)}
        self._metrics = {f"critic/{name.removeprefix('value/').replace('/', '_')}": value for name, value in metrics.items()}


class ServedCritic(CriticRole):
    """Trains in its own processes while the policy does; on shared GPUs before it. Rank 0 alone sends training, and awaits it in the next
    step."""

    def __init__(self, task: OnlineTask, critic: Critic) -> None:
        super().__init__(task)
        self.asked: Critic = critic
        self._training: Future[dict[str, float]] | None = None  # rank 0's
        self._step = 0  # whose rollouts it trains on, the same on every rank; 0: it does not train
        self._mark_before: str | None = None  # before the step under way: what that one sends is not part of the state

    def begin_step(self) -> dict[str, float]:
        metrics = super().begin_step()
        self._mark_before = self.asked.mark
        return metrics

    def train(self, batch: ValueBatch, step: int, clock: Clock) -> None:
        if self.task.judges.shared is None:
            self._send(batch, step)
            return
        with clock.phase("critic_wait"), self.task.given_away():
            self._send(batch, step)
            self.finish()

    def end_step(self) -> None:
        self._mark_before = None

    def finish(self) -> None:
        if not self._step:
            return
        step, self._step = self._step, 0
        training = self._training

        def trained() -> tuple[dict[str, float], str]:
            assert training is not None  # on rank 0
            return training.result(), self.asked.mark

        metrics, mark = from_rank_0(trained)
        self.asked.follow(mark)
        self._trained(metrics, step)

    def state(self) -> dict[str, Any]:
        return super().state() | {"critic_mark": self.asked.mark if self._mark_before is None else self._mark_before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        if "critic_mark" not in state:
            raise CheckpointError(
                "critic.kind=server: the actor trained the critic of this checkpoint, and no server knows on what; allowed: "
                "critic.kind=model, or a new run with critic.model.path=RUN/checkpoints/critic"
            )
        mark = state["critic_mark"]
        with self.task.given_away():
            from_rank_0(lambda: self.asked.resume(mark))
        self.asked.follow(mark)

    def _send(self, batch: ValueBatch, step: int) -> None:
        self._training = self.asked.train(batch, step) if self.task.topology.rank == 0 else None
        self._step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTraining:
    """How a value model learns from the returns of a step."""

    loss: Loss[ValueBatch]
    mini_batch_size: int
    num_epochs: int


class ModelCritic(CriticRole):
    """A value model on the actor's ranks, which computes and trains in turn with the policy.

    With `takes_turns`, its weights and training state wait in host memory while it neither computes nor is saved or loaded. `tokenizer`:
    the folder from which its checkpoints take theirs.
    """

    def __init__(
        self, task: OnlineTask, values: MegatronValueModel, training: ValueTraining, *, tokenizer: Path, takes_turns: bool = False
    ) -> None:
        super().__init__(task)
        self.tokenizer = tokenizer
        self._values = values
        self._training = training
        self._takes_turns = takes_turns
        self._leave()

    @property
    def model(self) -> Any:
        """The `TrainableModel`."""
        return self._values.model

    @contextmanager
    def present(self) -> Iterator[None]:
        """In the block the model is on the device."""
        if self._takes_turns:
            self.model.enter_device()
        yield
        self._leave()

    def _leave(self) -> None:
        if self._takes_turns:
            self.model.leave_device()
            platform.release_cached()

    def values(self, collected: ScoredRollouts, clock: Clock) -> ScoredRollouts:
        rows = _without_routes(token_rows(collected.rollouts, self.task.pad_id))
        with clock.phase("values"), self.present():
            values = self._values.values(rows)
        lengths = rows.lengths.tolist()
        return replace(collected, values=[row[:length] for row, length in zip(values, lengths, strict=True)])

    def train(self, batch: ValueBatch, step: int, clock: Clock) -> None:
        how = self._training
        with clock.phase("critic"), self.present():
            sizes = {"mini_batch_size": how.mini_batch_size, "num_epochs": how.num_epochs}
            metrics = train_on_returns(self._values, _without_routes(batch), how.loss, **sizes)
        self._trained(metrics, step)


class HeadCritic(CriticRole):
    """A head on the policy's last hidden states: values come with its log-probs, and the policy's updates have the value loss too."""

    def __init__(self, task: OnlineTask, loss: Loss[Any], *, coef: float) -> None:
        super().__init__(task)
        self.added = [Added(batch=None, loss=loss, coef=coef)]

    def evaluate(
        self, collected: ScoredRollouts, batch: RolloutBatch, policy: Policy, clock: Clock
    ) -> tuple[ScoredRollouts, Mapping[str, Tensor]]:
        with clock.phase("logprobs"):
            found = policy.per_token(batch, "logprobs", "entropy", "values")
        lengths = batch.lengths.tolist()
        return replace(collected, values=[row[:length] for row, length in zip(found["values"], lengths, strict=True)]), found

    def learnt(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        own = {name: metric for name, metric in metrics.items() if name.startswith("value/")}
        if own:
            self._report(numbers(own))
        return {name: metric for name, metric in metrics.items() if name not in own}


def _without_routes(batch: BatchT) -> BatchT:
    """The rows with what a server would be sent: the routes are those of the policy's experts."""
    return replace(batch, extras={name: extra for name, extra in batch.extras.items() if extra.is_sent})
