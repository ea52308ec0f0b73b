"""Rewards behind a server: a reward model on tokens, or a Python function on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.servers.intake import Operation
from aligner.servers.wire import REWARD_MODEL, RewardRequest, RewardTexts
from aligner.settings.user_code import calling
from aligner.types import TokenBatch

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

    Requests that hold only tokens are turned into texts with `decode(tokens)`, if it is given; prompt and response cannot be told apart
    then: the prompt is empty and the response is the whole text.
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
