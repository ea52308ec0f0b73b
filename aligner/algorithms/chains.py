"""What Constitutional AI (see `constitution.py`) makes: the chain of a prompt, its records, and preferences by a language model
(2212.08073, section 4.1), which are the odds that it gives (A) over (B).

Both responses are asked about in both orders. With d1 the log-odds of the first response when it is (A), and d2 when it is (B),

    log-odds = (d1 + d2) / 2        position bias = (d1 - d2) / 2,

so that whatever a model adds to the log-odds of (A) by itself, whoever stands there, is gone; several questions are averaged. The log-odds
are those of a Bradley-Terry model: the difference of the two rewards.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.constitution import Case, Constitution, Framing, Principle, Question
from aligner.errors import UP_TO_1, ConfigError, DataError, RunHalted, check_numbers, check_range
from aligner.files import publish
from aligner.hub.names import Files
from aligner.loop.writing import Parts, Record
from aligner.types import LabeledBatch

SUPERVISED, PREFERENCES, TRACES = "records.jsonl", "preferences.jsonl", "traces.jsonl"

TOO_LONG = "too_long"
ROWS = 4  # of a question: two answers, in two orders


class Pairs(str, Enum):
    """Which two responses are compared."""

    none = "none"
    revised = "revised"  # the last revision with the response that it came from
    sampled = "sampled"  # two responses that are sampled
    given = "given"  # those of the records; nothing is sampled


class Learnt(str, Enum):
    """Which revisions become supervised records."""

    last = "last"
    every = "every"


class Broken(str, Enum):
    """How to treat a chain in which a step fails."""

    drop = "drop"  # it is left out
    shorten = "shorten"  # it ends with its last whole revision, if it has one


@dataclass(kw_only=True, slots=True)
class ConstitutionConfig:
    """Settings of critiques, revisions and comparisons."""

    num_chains: int = 1  # of every prompt
    num_revisions: int = 1  # rounds of critique and revision; 0: responses are only compared
    learnt: Learnt = Learnt.last  # which revisions of a chain become supervised records: its last one, or every one
    broken: Broken = Broken.drop  # a chain in which a step goes wrong: drop it, or shorten it to its last whole revision
    pairs: Pairs = Pairs.revised  # which two responses are compared: a revision with its origin, two sampled, the two of a record; none
    num_questions: int = 1  # principles by which two responses are compared, each with its question; log-odds are averaged
    min_probability: float = 0.5  # of the better response: comparisons below it, and ties, are undecided and left out
    min_mass: float = 0.0  # probability that the judge must have on its two answers: comparisons below it are left out
    part_size: int = 256  # prompts per file: what a job that is killed does again, at most
    batch_size: int = 16  # questions that are answered together, each of four rows

    def __post_init__(self) -> None:
        counts = ("num_chains", "num_questions", "part_size", "batch_size")
        check_numbers(self, "algorithm", at_least_1=counts, not_negative=("num_revisions",))
        check_range(self, "algorithm", (lambda value: 0.5 <= value <= 1, "must be from 0.5 to 1"), "min_probability")
        check_range(self, "algorithm", UP_TO_1, "min_mass")
        if not self.num_revisions and self.pairs in (Pairs.none, Pairs.revised):
            raise ConfigError(
                f"algorithm.num_revisions=0: with algorithm.pairs={self.pairs.value} there is nothing to write; allowed: sampled"
            )
        if self.pairs is Pairs.given and (self.num_revisions or self.num_chains > 1):
            raise ConfigError(
                f"algorithm.pairs=given: nothing is sampled; allowed: num_revisions=0, num_chains=1, not {self.num_revisions} and "
                f"{self.num_chains}"
            )

    @property
    def samples_per_chain(self) -> int:
        """Texts that the engine samples for one chain, at most."""
        return 0 if self.pairs is Pairs.given else 1 + 2 * self.num_revisions + (self.pairs is Pairs.sampled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A critique and the revision that followed it."""

    principle: str
    critique: str
    revision: str


@dataclass(kw_only=True, slots=True)
class Chain:
    """The chain of a case. `fault` names what failed ('' if nothing did); the chain ends there."""

    case: Case
    number: int  # of the case's chains
    row: int  # its place in the part
    principles: list[Principle]
    draft: str = ""
    rounds: list[Round] = field(default_factory=list)
    fault: str = ""
    second: str = ""  # another response to the case
    second_fault: str = ""

    @property
    def newest(self) -> str:
        """The last revision, or the draft."""
        return self.rounds[-1].revision if self.rounds else self.draft


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two responses that are to be compared; `kinds` say what they are."""

    first: str
    second: str
    kinds: tuple[str, str]


def supervised_records(trace: Mapping[str, Any]) -> list[Record]:
    """The training records of a trace, as `train_sft` reads them: `{prompt, response}`, with how the response came to be."""
    rounds = trace["rounds"]
    return [
        {
            "prompt": trace["prompt"],
            "response": rounds[number]["revision"],
            "source": trace["source"],
            "draft": trace["draft"],
            "principles": [one["principle"] for one in rounds[: number + 1]],
            "critiques": [one["critique"] for one in rounds[: number + 1]],
            "revisions": [one["revision"] for one in rounds[: number + 1]],
        }
        for number in trace["learnt"]
    ]


def preference_records(trace: Mapping[str, Any]) -> list[Record]:
    """The trace's preference, as `train_reward_model` and `train_dpo` read it: the rewards differ by the log-odds."""
    found = trace.get("comparison")
    if found is None or found["left_out"]:
        return []
    better, worse = ("first", "second") if found["margin"] > 0 else ("second", "first")
    margin = abs(found["margin"])
    return [
        {
            "prompt": trace["prompt"],
            "chosen": found[better],
            "rejected": found[worse],
            "chosen_reward": margin / 2,
            "rejected_reward": -margin / 2,
            "probability": max(found["probability"], 1 - found["probability"]),
            "chosen_is": found["kinds"][0 if better == "first" else 1],
            "questions": found["questions"],
            "source": trace["source"],
        }
    ]


def discards_of(trace: Mapping[str, Any]) -> list[str]:
    """The unused parts of a trace, with reasons: `left_out/<name>` or `shortened/<name>` of a chain, `left_out/comparison_<name>`."""
    fault, comparison = trace["fault"], trace.get("comparison", {"left_out": ""})
    found = [f"{'shortened' if trace['learnt'] else 'left_out'}/{fault}"] if fault else []
    reason = comparison["left_out"]
    return [*found, f"left_out/comparison_{reason}"] if reason and reason != fault else found


def trace_metrics(traces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a part: how many chains and comparisons are used, and by name how many are not."""
    counts = Counter(name for trace in traces for name in discards_of(trace))
    found = {name: float(count) for name, count in sorted(counts.items())}
    found["constitution/supervised"] = float(sum(len(trace["learnt"]) for trace in traces))
    revised = [trace for trace in traces if trace["rounds"]]
    if revised:
        found["constitution/unchanged"] = sum(trace["rounds"][-1]["revision"] == trace["draft"] for trace in revised) / len(revised)
    compared = [trace for trace in traces if "comparison" in trace]
    if compared:
        records = [record for trace in compared for record in preference_records(trace)]
        found["preference/pairs"] = float(len(records))
        kinds = Counter(str(record["chosen_is"]) for record in records)
        found |= {f"preference/{kind}_chosen": kinds[kind] / len(records) for kind in sorted(kinds)}
    return found


def trace_of(chain: Chain, config: ConstitutionConfig) -> dict[str, Any]:
    """`learnt` are the rounds whose revisions are supervised records."""
    case, rounds = chain.case, chain.rounds
    whole = rounds and (not chain.fault or config.broken is Broken.shorten)
    learnt = [] if not whole else list(range(len(rounds))) if config.learnt is Learnt.every else [len(rounds) - 1]
    return {
        "source": case.prompt.source,
        "chain": chain.number,
        "prompt": case.as_json,
        "draft": case.response(chain.draft) if chain.draft else "",
        "rounds": [{"principle": one.principle, "critique": one.critique, "revision": case.response(one.revision)} for one in rounds],
        "fault": chain.fault,
        "learnt": learnt,
    }


def pair_of(chain: Chain, config: ConstitutionConfig) -> Pair | str:
    """The two responses of a chain that are compared, or why there are none."""
    if config.pairs is Pairs.given:
        assert chain.case.pair is not None  # what such a case is made of
        first, second = chain.case.pair
        pair = Pair(first=first, second=second, kinds=("first", "second"))
    elif config.pairs is Pairs.sampled:
        if chain.second_fault or not chain.second:
            return chain.second_fault or chain.fault
        pair = Pair(first=chain.draft, second=chain.second, kinds=("first", "second"))
    else:
        if not chain.rounds or (chain.fault and config.broken is Broken.drop):
            return chain.fault
        pair = Pair(first=chain.newest, second=chain.draft, kinds=("revision", "draft"))
    return "identical" if pair.first == pair.second else pair


def comparison_of(case: Case, pair: Pair, judgement: Judgement | None, config: ConstitutionConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"first": case.response(pair.first), "second": case.response(pair.second), "kinds": list(pair.kinds)}
    if judgement is None:
        return found | {"left_out": TOO_LONG}
    probability = judgement.probability
    reason = ""
    if judgement.mass < config.min_mass:
        reason = "not_understood"
    elif not judgement.margin or max(probability, 1 - probability) < config.min_probability:
        reason = "undecided"
    odds = [list(both) for both in judgement.log_odds]
    return found | {"margin": judgement.margin, "probability": probability, "log_odds": odds, "mass": judgement.mass, "left_out": reason}


def check_constitution(constitution: Constitution, config: Any) -> None:
    """Raise DataError if no principle asks for what the job does."""
    where = config.data.constitution
    if config.algorithm.num_revisions and not constitution.revising:
        raise DataError(f"{where}: no principle has critique_request and revision_request (algorithm.num_revisions=0 needs none)")
    if config.algorithm.pairs is not Pairs.none and not constitution.comparing:
        raise DataError(f"{where}: no principle has a question (algorithm.pairs=none needs none)")


def publish_feedback(parts: Parts, folder: Path, *, constitution: Constitution, wanted: Sequence[str]) -> str:
    """Write the parts as files for training, and a report, which is returned. Raises DataError if a wanted file has no record."""
    counts: Counter[str] = Counter()
    for part in range(parts.num_parts):
        for trace in parts.read(part):
            counts.update(discards_of(trace))
            counts.update({SUPERVISED: len(supervised_records(trace)), PREFERENCES: len(preference_records(trace)), TRACES: 1})
    parts.join(folder / TRACES)
    for name, select in ((SUPERVISED, supervised_records), (PREFERENCES, preference_records)):
        if name in wanted:
            parts.join(folder / name, select)
    publish(folder / "constitution.json", lambda new: new.write_text(constitution.to_json()))
    files = (TRACES, *wanted)
    losses = {name: counts[name] for name in sorted(counts) if "/" in name}
    report = {"records": {name: counts[name] for name in files}, "not used": losses}
    publish(folder / "report.json", lambda new: new.write_text(json.dumps(report, indent=2) + "\n"))
    told = ", ".join(f"{counts[name]} {name}" for name in files)
    lost = ", ".join(f"{count} {name}" for name, count in losses.items())
    said = f"in {folder}: {told}; {f'not used: {lost}' if lost else 'everything was used'}"
    if empty := [name for name in wanted if not counts[name]]:
        raise DataError(f"{folder / empty[0]} has no record: {said}; {folder / TRACES} has every text")
    return said


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
    """For every question the log-odds that the first response is better as (A), and as (B). `mass`: mean probability on the two."""

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
        """Judgements of pairs, each asked its questions; None if one is too long. Raises RunHalted if log-probs are not finite."""
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
