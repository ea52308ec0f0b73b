"""Preferences from a language model (Bai et al. 2022, 2212.08073, section 4.1): the odds that it gives (A) over (B).

Both responses are asked about in both orders. With d1 the log-odds of the first response when it is (A), and d2 when it is (B),

    log-odds = (d1 + d2) / 2        position bias = (d1 - d2) / 2,

so that whatever a model adds to the log-odds of (A) by itself, whoever stands there, is gone; several questions are averaged. The log-odds
are those of a Bradley-Terry model: the difference of the two rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from aligner.data.collate import supervised_batch
from aligner.data.constitution import Framing, Question
from aligner.data.supervised import SupervisedExample
from aligner.errors import RunHalted
from aligner.hub.names import Files
from aligner.types import LabeledBatch

ROWS = 4  # of a question: two answers, in two orders


class JudgeFraming(str, Enum):
    """How the judge is asked."""

    data = "data"  # as the data are: data.apply_chat_template
    chat = "chat"  # through its chat template
    text = "text"  # as plain text, which is for pretrained models


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """Who compares responses."""

    path: str = ""  # a frozen model of the same shape, whose weights wait in host memory; empty: model.path itself
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model}
    framing: JudgeFraming = JudgeFraming.data  # how the judge is asked: as the data are, through its chat template, or as plain text


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a judge says of two responses: for every question the log-odds that the first is better when it is (A), and when it is (B).

    `mass`: how much of the probability was on the two answers, in the mean; little says that the questions were not understood.
    """

    log_odds: tuple[tuple[float, float], ...]
    mass: float

    @property
    def margin(self) -> float:
        """Log-odds that the first is better, over questions and orders."""
        return sum(one + other for one, other in self.log_odds) / (2 * len(self.log_odds))

    @property
    def probability(self) -> float:
        """That the first is better."""
        return sigmoid(self.margin)

    @property
    def entropy(self) -> float:
        """Of this probability, in nats: ln 2 if the judge cannot tell."""
        parts = (sigmoid(self.margin), sigmoid(-self.margin))
        return -sum(p * math.log(p) for p in parts if p)

    @property
    def position_bias(self) -> float:
        """Log-odds of (A) whatever it is."""
        return sum(one - other for one, other in self.log_odds) / (2 * len(self.log_odds))

    @property
    def agrees(self) -> bool:
        """Whether both orders have the same winner, over the questions."""
        ones, others = (sum(side) for side in zip(*self.log_odds, strict=True))
        return bool(ones * others > 0)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """A language model that is asked. Every rank makes one; `compare` is collective.

    `logprobs` is `aligner.protocols.Policy.logprobs` at temperature 1; `max_length`: tokens of the longest question with its answer;
    `batch_size`: questions that are in memory together; `heartbeat` is called as they are answered.
    """

    logprobs: Callable[[LabeledBatch], Tensor]
    framing: Framing
    chat: bool
    pad_id: int
    max_length: int
    batch_size: int
    heartbeat: Callable[[], None] = lambda: None

    def compare(self, asked: Sequence[Sequence[Question]], sources: Sequence[str]) -> list[Judgement | None]:
        """Judgements of pairs of responses, each asked all of its questions; None if a question is too long.

        Raises RunHalted if log-probs are not finite.
        """
        rows = [self._rows(questions, source) for questions, source in zip(asked, sources, strict=True)]
        scored = iter(self._scores([row for some in rows for row in some or ()]))
        found: list[Judgement | None] = []
        for some in rows:
            if some is None:
                found.append(None)
                continue
            scores = [[next(scored) for _ in range(ROWS)] for _ in range(len(some) // ROWS)]
            odds = tuple((a - b, turned_b - turned_a) for a, b, turned_a, turned_b in scores)
            mass = sum(math.exp(score) for four in scores for score in four) / (2 * len(scores))
            found.append(Judgement(log_odds=odds, mass=mass))
        return found

    def _rows(self, questions: Sequence[Question], source: str) -> list[SupervisedExample] | None:
        options = [one for asked in questions for order in (asked, asked.turned) for one in self.framing.options(order, chat=self.chat)]
        if any(len(tokens) > self.max_length for tokens, _ in options):
            return None
        return [
            SupervisedExample(tokens=tuple(tokens), loss_mask=tuple(place >= start for place in range(len(tokens))), source=source)
            for tokens, start in options
        ]

    def _scores(self, rows: Sequence[SupervisedExample]) -> list[float]:
        """The log-prob of every row's answer."""
        found: list[float] = []
        size = self.batch_size * ROWS
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            scores = self.logprobs(supervised_batch(part, self.pad_id)).double().sum(dim=1).tolist()
            if bad := [row.source for row, score in zip(part, scores, strict=True) if not math.isfinite(score)]:
                raise RunHalted(f"{bad[0]}: the judge's log-probs are not finite ({len(bad)} of {len(part)} rows): look at its weights")
            found += scores
            self.heartbeat()
        return found


def judgement_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Means over comparisons; empty without any."""
    if not judgements:
        return {}
    count = len(judgements)
    return {
        "preference/entropy": sum(one.entropy for one in judgements) / count,
        "preference/position_bias": sum(one.position_bias for one in judgements) / count,
        "preference/orders_agree": sum(one.agrees for one in judgements) / count,
        "preference/mass": sum(one.mass for one in judgements) / count,
    }
