"""A reward from another model's judgement of responses, alone or in pairs (`reward.functions.NAME.judge`).

An answer that does not parse is named in the log, and counts for nothing: a response without any other is invalid, which is no score of 0.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from aligner.errors import AlignerError
from aligner.rewards.chat_client import ChatClient, EndpointRefused, KnownAnswers
from aligner.rewards.config import Compare, NamedRewardConfig, OnError
from aligner.rewards.forms import Sample
from aligner.rewards.local import Complaints, RewardError, RewardRefused, Samples
from aligner.rewards.verdicts import Questions, Verdict, excerpt, turns
from aligner.types import Rollout, Scores

_PER_MILLION = 1e-6


@dataclass(slots=True)
class _Judged:
    """One response's scores, each item's parts, and the tokens that they took."""

    scores: list[float] = field(default_factory=list)
    items: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: float = 0.0
    cost: float = 0.0


class JudgeReward:
    """`aligner.protocols.RewardModel`, whose `score` of a judge that compares within groups wants whole groups (`needs_groups`).

    `part_names`: what `Scores.parts` has besides the reward: the rubric's items, the tokens of each response's judgements, their cost.
    """

    def __init__(self, name: str, config: NamedRewardConfig, decode: Callable[[Sequence[int]], str], answers: Path | None = None) -> None:
        setting = f"reward.functions.{name}"
        self._name, self._config, self._decode = name, config, decode
        self._questions = Questions.of(config.judge, f"{setting}.judge")
        self._client = ChatClient(config, setting, KnownAnswers(answers if config.judge.cache else None))
        self._complaints = Complaints(f"judge {name}", rule="")
        self._totals = {"judgements": 0, "unparsable or failed": 0, "tokens asked": 0, "tokens answered": 0}
        self.about = f"judge {name}: {config.judge.model} at {config.url}"
        priced = config.judge.prompt_price or config.judge.completion_price
        self.part_names = tuple(f"{name}_{part}" for part in (*config.judge.rubric, "tokens", *(["cost"] if priced else [])))

    @property
    def needs_groups(self) -> bool:
        """Whether `score` wants all responses to a prompt at once."""
        return self._config.judge.compare is Compare.group

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """The future raises RewardError, naming a sample, if the endpoint fails for good and `on_error` is stop."""
        return self._client.start(self._score(Samples.of(rollouts, self._decode)))

    def close(self) -> None:
        """Print what was asked for, and drop what is under way."""
        if self._totals["judgements"]:
            totals, judge = self._totals, self._config.judge
            cost = judge.prompt_price * totals["tokens asked"] + judge.completion_price * totals["tokens answered"]
            said = ", ".join(f"{count:,} {what}" for what, count in totals.items())
            print(f"judge {self._name}: {said}" + (f", cost {cost * _PER_MILLION:.4g}" if cost else ""), flush=True)
        self._client.close()

    async def _score(self, samples: Samples) -> Scores:
        rows = [_Judged() for _ in range(len(samples))]
        tasks = [asyncio.ensure_future(work) for work in self._works(samples, rows)]
        try:
            complaints = [one for one in await asyncio.gather(*tasks) if one]
        except AlignerError:
            for task in tasks:  # nobody waits for them any more, and they cost
                task.cancel()
            raise
        if complaints:
            self._complaints.say(f"{len(complaints)} of {len(tasks)} judgements count for nothing: {complaints[0]}", samples.version)
        rewards = [_mean(row.scores) for row in rows]
        parts: dict[str, list[float]] = {
            f"{self._name}_{item}": [_mean(row.items[item]) for row in rows] for item in self._config.judge.rubric
        }
        parts |= {f"{self._name}_tokens": [row.tokens for row in rows], f"{self._name}_cost": [row.cost for row in rows]}
        valid = torch.tensor([not math.isnan(reward) for reward in rewards], dtype=torch.bool)
        return Scores(
            rewards=torch.tensor(rewards, dtype=torch.float32),
            valid=valid,
            parts={name: torch.tensor(parts[name], dtype=torch.float32) for name in self.part_names},
            silent=torch.tensor([self.needs_groups and len(group) < 2 for group in self._group_of(samples)], dtype=torch.bool),
        )

    def _works(self, samples: Samples, rows: list[_Judged]) -> list[Any]:
        """A coroutine for every judgement; each returns a complaint, empty if it counts."""
        judge, numbers = self._config.judge, range(self._config.judge.samples)
        if judge.compare is Compare.nothing:
            return [self._alone(samples, row, number, rows) for row in range(len(samples)) for number in numbers]
        if judge.compare is Compare.answer:
            if missing := [one for one in samples.samples if one.answer is None]:
                raise RewardRefused(
                    f"judge {self._name}: {missing[0].source} has no reference answer; judge.compare=answer needs one (data.answer_field)"
                )
            return [self._pair(samples, row, None, number, rows) for row in range(len(samples)) for number in numbers]
        groups = {group[0]: group for group in self._group_of(samples)}.values()
        pairs = [pair for group in groups for pair in _pairs(group, judge.opponents)]
        return [self._pair(samples, one, other, number, rows) for one, other in pairs for number in numbers]

    def _group_of(self, samples: Samples) -> list[list[int]]:
        """Of each sample, the rows of the responses to its prompt."""
        groups: dict[Any, list[int]] = defaultdict(list)
        keys = [(sample.rollout.prompt.id, sample.source, sample.rollout.prompt.tokens) for sample in samples.samples]
        for row, key in enumerate(keys):
            groups[key].append(row)
        return [groups[key] for key in keys]

    async def _alone(self, samples: Samples, row: int, number: int, rows: list[_Judged]) -> str:
        sample = samples.samples[row]
        texts = {"response": sample.response, "reasoning": sample.reasoning, "answer_text": sample.answer_text}
        verdict, complaint = await self._verdict(samples, (row,), texts, number, rows)
        if verdict is not None:
            rows[row].scores.append(verdict.value)
            for item, value in verdict.items.items():
                rows[row].items[item].append(value)
        return complaint

    async def _pair(self, samples: Samples, row: int, other: int | None, number: int, rows: list[_Judged]) -> str:
        """Asked in both orders, a pair counts if both answers parse: a single order would bring the judge's bias for a place back."""
        one = samples.samples[row].answer_text
        two = str(samples.samples[row].answer) if other is None else samples.samples[other].answer_text
        own = (row,) if other is None else (row, other)
        asked = [(one, two), (two, one)] if self._config.judge.swap else [(one, two)]
        answers = await asyncio.gather(*(self._verdict(samples, own, {"response_a": a, "response_b": b}, number, rows) for a, b in asked))
        if complaint := next((complaint for _, complaint in answers if complaint), ""):
            return complaint
        values = [verdict.value for verdict, _ in answers if verdict is not None]
        outcome = (values[0] + 1 - values[1]) / 2 if self._config.judge.swap else values[0]
        rows[row].scores.append(outcome)
        if other is not None:
            rows[other].scores.append(1 - outcome)
        return ""

    async def _verdict(
        self, samples: Samples, own: tuple[int, ...], texts: dict[str, str], number: int, rows: list[_Judged]
    ) -> tuple[Verdict | None, str]:
        """The verdict, or why there is none. Its tokens are shared out over its rows. Raises RewardError."""
        judge, where = self._config.judge, samples.describe(own[0])
        body = {"model": judge.model, "messages": self._questions.ask(_of(samples.samples[own[0]]) | texts), "max_tokens": judge.max_tokens}
        body |= {"temperature": judge.temperature} | ({"seed": number} if judge.samples > 1 else {}) | dict(judge.body)
        self._totals["judgements"] += 1
        try:
            answer = await self._client.ask(body)
        except EndpointRefused as error:
            self._totals["unparsable or failed"] += 1
            if self._config.on_error is OnError.stop:
                raise RewardError(f"{error}; for {where} (on_error=stop)") from error
            return None, f"{error}; for {where}"
        self._totals["tokens asked"] += answer.prompt_tokens
        self._totals["tokens answered"] += answer.completion_tokens
        for row in own:
            rows[row].tokens += (answer.prompt_tokens + answer.completion_tokens) / len(own)
            cost = judge.prompt_price * answer.prompt_tokens + judge.completion_price * answer.completion_tokens
            rows[row].cost += cost * _PER_MILLION / len(own)
        if (verdict := self._questions.read(answer.text)) is not None:
            return verdict, ""
        self._totals["unparsable or failed"] += 1
        cut = f", cut at judge.max_tokens={judge.max_tokens}" if answer.is_cut else ""
        return None, f"unparsable answer {excerpt(answer.text)}{cut}; for {where}"


def _of(sample: Sample) -> dict[str, Any]:
    prompt = sample.rollout.prompt
    return {"prompt": sample.prompt, "messages": turns(prompt.messages), "answer": sample.answer, "columns": dict(prompt.columns)}


def _pairs(group: Sequence[int], opponents: int) -> list[tuple[int, int]]:
    """All pairs, or those of each with the next `opponents` around the group."""
    size = len(group)
    if not opponents or 2 * opponents >= size - 1:
        return list(combinations(group, 2))
    return [(group[place], group[(place + step) % size]) for place in range(size) for step in range(1, opponents + 1)]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
