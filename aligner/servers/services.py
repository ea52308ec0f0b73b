"""What servers do: a critic, which infers, trains and saves; a reward model on tokens; a reward function on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.protocols import Loss, Trainable
from aligner.servers.intake import Operation
from aligner.servers.ledger import Ledger
from aligner.servers.payloads import CriticStatus, SaveRequest, StatusRequest, TrainReply, TrainRequest, ValuesRequest
from aligner.servers.wire import CRITIC_INFER, CRITIC_SAVE, CRITIC_STATUS, CRITIC_TRAIN, REWARD_MODEL, RewardRequest, RewardTexts
from aligner.settings.user_code import calling
from aligner.telemetry.metrics import Metric, merge, values
from aligner.types import TokenBatch
from aligner.types.rows import num_rows, select_rows


class ValueModel(Trainable, Protocol):
    """Protocol of a served value model; called on all ranks of the component with the full batch."""

    def values(self, batch: TokenBatch) -> Tensor:
        """Values float32 [B, S]; no gradient, no dropout."""


class CriticService:
    """The operations of a critic. Every rank constructs one around its part of the model.

    A train request is split in order into mini-batches of `mini_batch_size` rows (the last may be smaller), each one optimizer step, and
    this `num_epochs` times. Each request is applied once: `ledger` records which. `save(request)` writes a checkpoint with the ledger and
    returns its path; it raises `ledger.Refused` for a request that means another critic. `loss_metric` is reported as `loss_mean`.
    """

    def __init__(
        self,
        model: ValueModel,
        loss: Loss,
        ledger: Ledger,
        *,
        mini_batch_size: int,
        num_epochs: int,
        save: Callable[[SaveRequest], str],
        loss_metric: str = "value/loss",
    ) -> None:
        if mini_batch_size < 1 or num_epochs < 1:
            raise ValueError(f"CriticService: mini_batch_size is {mini_batch_size}, num_epochs is {num_epochs}; both must be at least 1")
        self._model = model
        self._loss = loss
        self._ledger = ledger
        self._mini_batch_size = mini_batch_size
        self._num_epochs = num_epochs
        self._save = save
        self._loss_metric = loss_metric

    def infer(self, request: ValuesRequest) -> Tensor:
        """Values float32 [B, S], 0 in the padding. Raises `ledger.Refused` if the request means another critic than the current one."""
        if request.after is not None:
            self._ledger.check_after(request.after)
        batch = request.batch
        positions = torch.arange(batch.tokens.shape[1])
        inside = positions[None] < batch.lengths[:, None]
        return torch.where(inside, self._model.values(batch).float().cpu(), 0.0)

    def train(self, request: TrainRequest) -> TrainReply:
        """Train on one step's rollouts; the metrics are merged over all optimizer steps. A request that was applied is only answered.

        Raises `ledger.Refused` if the request does not follow the last applied one.
        """
        recorded = self._ledger.find(request.identity)
        if recorded is not None:
            return recorded
        rows = num_rows(request.batch)
        parts: list[dict[str, Metric]] = []
        for _ in range(self._num_epochs):
            for start in range(0, rows, self._mini_batch_size):
                batch = select_rows(request.batch, start, min(start + self._mini_batch_size, rows))
                parts.append(self._model.train_step(batch, self._loss))
        numbers = values(merge(parts))
        reply = TrainReply(loss_mean=numbers[self._loss_metric], metrics=numbers)
        self._ledger.record(request.identity, reply)
        return reply

    def save(self, request: SaveRequest) -> str:
        """The path of the new checkpoint."""
        return self._save(request)

    def status(self, request: StatusRequest) -> CriticStatus:
        """The training history of this critic: its mark and counts."""
        self._ledger.check_run(request.run)
        if request.adopt is not None:
            self._ledger.adopt(request.adopt)
        return self._ledger.status()

    def operations(self) -> tuple[Operation, ...]:
        """For `server.serve`."""
        return (
            Operation(endpoint=CRITIC_INFER, handler=self.infer),
            Operation(endpoint=CRITIC_TRAIN, handler=self.train),
            Operation(endpoint=CRITIC_SAVE, handler=self.save),
            Operation(endpoint=CRITIC_STATUS, handler=self.status, computes=False),
        )


TextReward = Callable[[list[str], list[str], list[str | None]], Sequence[float]]  # prompts, responses, answers -> one reward each


class ScoreModel(Protocol):
    """Protocol of a served score model; called on all ranks of the component with the full batch."""

    def scores(self, batch: TokenBatch) -> Tensor:
        """Scores float32 [B, K]; no gradient, no dropout."""


class RewardService:
    """The operation of a reward model. Requests that hold only texts are encoded with `encode(prompt + response)`, if it is given."""

    def __init__(self, model: ScoreModel, *, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self._model = model
        self._encode = encode

    def check(self, request: RewardRequest) -> None:
        """Raise ValueError for texts that cannot be turned into tokens."""
        if request.batch is None and self._encode is None:
            raise ValueError("tokens: missing; this reward model scores tokens and was given no tokenizer for texts")

    def score(self, request: RewardRequest) -> Tensor:
        """Scores float32 [B, K]."""
        return self._model.scores(self._encoded(request.texts) if request.batch is None else request.batch)

    def operations(self) -> tuple[Operation, ...]:
        """For `server.serve`."""
        return (Operation(endpoint=REWARD_MODEL, handler=self.score, check=self.check),)

    def _encoded(self, texts: RewardTexts) -> TokenBatch:
        rows = [self._encode(prompt + response) for prompt, response in zip(texts.prompts, texts.responses, strict=True)]
        return token_batch(rows, 0)


class FunctionRewardService:
    """The operation of a reward function `(prompts, responses, answers) -> rewards`.

    Requests of tokens alone are turned into responses to an empty prompt with `decode(tokens)`, if it is given.
    """

    def __init__(self, function: TextReward, *, name: str = "", decode: Callable[[list[int]], str] | None = None) -> None:
        self._function = function
        self._name = name or repr(function)
        self._decode = decode

    def check(self, request: RewardRequest) -> None:
        """Raise ValueError for tokens that cannot be turned into texts."""
        if request.texts is None and self._decode is None:
            raise ValueError("responses: missing; this reward function scores texts and was given no tokenizer for tokens")

    def score(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B, 1]."""
        texts = request.texts or self._decoded(request.batch)
        with calling(f"reward function {self._name}"):
            rewards = list(self._function(texts.prompts, texts.responses, texts.answers))
        if len(rewards) != len(texts.responses):
            raise ValueError(f"the reward function returned {len(rewards)} rewards for {len(texts.responses)} responses")
        return torch.tensor(rewards, dtype=torch.float32)[:, None]

    def operations(self) -> tuple[Operation, ...]:
        """For `server.serve`."""
        return (Operation(endpoint=REWARD_MODEL, handler=self.score, check=self.check),)

    def _decoded(self, batch: TokenBatch) -> RewardTexts:
        responses = [self._decode(row[:length]) for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
        return RewardTexts(prompts=[""] * len(responses), responses=responses, answers=[None] * len(responses))
