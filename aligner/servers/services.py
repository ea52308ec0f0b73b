"""What servers do: a critic, which infers, trains and saves; a reward model on tokens; a reward function on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.losses.value import train_on_returns
from aligner.protocols import Loss, Trainable
from aligner.servers.intake import Operation
from aligner.servers.ledger import Ledger
from aligner.servers.payloads import CriticStatus, SaveRequest, StatusRequest, TrainReply, TrainRequest, ValuesRequest
from aligner.servers.wire import CRITIC_INFER, CRITIC_SAVE, CRITIC_STATUS, CRITIC_TRAIN, REWARD_MODEL, RewardRequest, RewardTexts
from aligner.settings.user_code import calling
from aligner.types import TokenBatch


class ValueModel(Trainable, Protocol):
    """Protocol of a served value model; called on all ranks of the component with the full batch."""

    def values(self, batch: TokenBatch) -> Tensor:
        """Values float32 [B, S]; no gradient, no dropout."""


@dataclass
class CriticService:
    """The operations of a critic. Every rank constructs one around its part of the model.

    Trains as `train_on_returns` does. Each request is applied once: `ledger` records which. `save(request)` writes a checkpoint with the
    ledger and returns its path; it raises `ledger.Refused` for a request that means another critic.
    """

    model: ValueModel
    loss: Loss
    ledger: Ledger
    _: KW_ONLY
    mini_batch_size: int
    num_epochs: int
    save: Callable[[SaveRequest], str]

    def infer(self, request: ValuesRequest) -> Tensor:
        """Values float32 [B, S], 0 in the padding. Raises `ledger.Refused` if the request means another critic than the current one."""
        if request.after is not None:
            self.ledger.check_after(request.after)
        batch = request.batch
        positions = torch.arange(batch.tokens.shape[1])
        inside = positions[None] < batch.lengths[:, None]
        return torch.where(inside, self.model.values(batch).float().cpu(), 0.0)

    def train(self, request: TrainRequest) -> TrainReply:
        """Train on one step's rollouts, once; metrics of all optimizer steps. Raises `ledger.Refused` for a request out of order."""
        recorded = self.ledger.find(request.identity)
        if recorded is not None:
            return recorded
        sizes = {"mini_batch_size": self.mini_batch_size, "num_epochs": self.num_epochs}
        numbers = train_on_returns(self.model, request.batch, self.loss, **sizes)
        reply = TrainReply(loss_mean=numbers["value/loss"], metrics=numbers)
        self.ledger.record(request.identity, reply)
        return reply

    def status(self, request: StatusRequest) -> CriticStatus:
        self.ledger.check_run(request.run)
        if request.adopt is not None:
            self.ledger.adopt(request.adopt)
        return self.ledger.status()

    def operations(self) -> tuple[Operation, ...]:
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


@dataclass
class RewardService:
    """The operation of a reward model. Requests that hold only texts are encoded with `encode(prompt + response)`, if it is given."""

    model: ScoreModel
    encode: Callable[[str], Sequence[int]] | None = None

    def check(self, request: RewardRequest) -> None:
        """Raise ValueError for texts that cannot be turned into tokens."""
        if request.batch is None and self.encode is None:
            raise ValueError("tokens: missing; this reward model scores tokens and was given no tokenizer for texts")

    def score(self, request: RewardRequest) -> Tensor:
        """Scores float32 [B, K]."""
        batch = request.batch
        if batch is None:
            texts = zip(request.texts.prompts, request.texts.responses, strict=True)
            batch = token_batch([self.encode(prompt + response) for prompt, response in texts], 0)
        return self.model.scores(batch)

    def operations(self) -> tuple[Operation, ...]:
        return (Operation(endpoint=REWARD_MODEL, handler=self.score, check=self.check),)


@dataclass
class FunctionRewardService:
    """The operation of a reward function `(prompts, responses, answers) -> rewards`. `decode` makes texts of tokens alone."""

    function: TextReward
    name: str = ""
    decode: Callable[[list[int]], str] | None = None

    def check(self, request: RewardRequest) -> None:
        """Raise ValueError for tokens that cannot be turned into texts."""
        if request.texts is None and self.decode is None:
            raise ValueError("responses: missing; this reward function scores texts and was given no tokenizer for tokens")

    def score(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B, 1]."""
        texts = request.texts
        if texts is None:
            rows = zip(request.batch.tokens.tolist(), request.batch.lengths.tolist(), strict=True)
            responses = [self.decode(row[:length]) for row, length in rows]
            texts = RewardTexts(prompts=[""] * len(responses), responses=responses, answers=[None] * len(responses))
        with calling(f"reward function {self.name or repr(self.function)}"):
            rewards = list(self.function(texts.prompts, texts.responses, texts.answers))
        if len(rewards) != len(texts.responses):
            raise ValueError(f"the reward function returned {len(rewards)} rewards for {len(texts.responses)} responses")
        return torch.tensor(rewards, dtype=torch.float32)[:, None]

    def operations(self) -> tuple[Operation, ...]:
        return (Operation(endpoint=REWARD_MODEL, handler=self.score, check=self.check),)
