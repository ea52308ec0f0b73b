"""Decoded requests and replies: the typed side of `wire.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aligner.servers.identity import TrainIdentity
from aligner.types import TokenBatch, ValueBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTexts:
    """Texts to score, one entry per row; an answer of None (on the wire: empty) means that the prompt has no reference answer."""

    prompts: list[str]
    responses: list[str]
    answers: list[str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """Rows to score, as tokens or as texts or as both."""

    batch: TokenBatch | None = None
    texts: RewardTexts | None = None

    def __post_init__(self) -> None:
        if self.batch is None and self.texts is None:
            raise ValueError("reward_model: send `tokens` with `sequence_lengths`, or `sentences`, or `prompts` with `responses`")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """Train on these rollouts, once."""

    batch: ValueBatch
    identity: TrainIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReply:
    """`loss_mean` over the masked tokens of the whole request, and every metric by name."""

    loss_mean: float
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesRequest:
    """Rows to value, by a critic that was trained last on the request of the mark `after` (None: by whatever critic there is)."""

    batch: TokenBatch
    after: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """Write a checkpoint for `step`, of the critic that was trained last on `after`. With `wait` the answer comes when it is complete."""

    step: int
    after: str | None = None
    wait: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """What has been applied? Asked by a client of `run`. With `adopt`, a critic that accepts a gap counts as trained last on that mark."""

    run: str
    adopt: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStatus:
    """A critic's training history: mark of the last request, number of requests, and step of its checkpoint (0: the first weights)."""

    run: str
    mark: str
    count: int
    checkpoint_step: int
    accepts_gap: bool


Payload = TokenBatch | ValuesRequest | TrainRequest | SaveRequest | StatusRequest | RewardRequest
Result = Tensor | TrainReply | CriticStatus | str
