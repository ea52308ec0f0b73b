"""The log-probs that SteerLM 2's records need (2406.08673, section 4.5): log P(a|x,y), log P(y|x) and log Q'(y|a,x), one of them a job.

An attribute model of this stack is a regression: a number per attribute, no probability. The paper makes one of it with a Beta
distribution around the score s, brought to r in [0, 1] from the labels' lowest and highest level:

    alpha = c r,  beta = c (1 - r),  c = 24 (the paper's, from the spread of HelpSteer2's labels)
    P(a = n | x, y) = I_high(alpha, beta) - I_low(alpha, beta),   I: the regularised incomplete beta function

The paper does not say where the bins end; here [low, high] is what rounds to the level n, as `annotate` rounds: (n -+ 1/2), brought to
[0, 1] and cut there. A label of several attributes has the product of their probabilities; one that it does not name is free.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aligner.algorithms.annotate import AnnotateConfig
from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.config import SampledDataConfig
from aligner.data.labelled import MISSING
from aligner.data.proposals import LabelQuery, Quantity, SampledGroup, load_sampled
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError, check_numbers
from aligner.loop.writing import Record, digest_of
from aligner.planner.workload import Head, Phase
from aligner.reporting.formats import Column
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits, WritingRun
from aligner.servers.config import ClientConfig

if TYPE_CHECKING:
    from aligner.jobs.writes import WriterJob

EDGE = 1e-3  # scores are kept so far from both ends: at an end all other levels would be impossible
SMALL, MOST_TERMS = 1e-15, 1000  # of the continued fraction


@dataclass(kw_only=True, slots=True)
class ProposalsConfig(AnnotateConfig):
    """Settings of the jobs that give sampled responses their log-probs. `attributes`, `lowest`, `highest`, `served_by`: of P(a|x,y)."""

    adds: Quantity = Quantity.proposal  # what model.path says of the responses
    concentration: float = 24.0  # c: how sure the attribute model is of its scores
    part_size: int = 256  # prompts per file, with all of their responses: what a job that is killed does again, at most

    def __post_init__(self) -> None:
        AnnotateConfig.__post_init__(self)
        check_numbers(self, "algorithm", above_0=("concentration",))
        if self.served_by and self.adds is not Quantity.attributes:
            raise ConfigError(f"algorithm.served_by={self.served_by}: a server gives scores; allowed: with algorithm.adds=attributes")

    @property
    def query(self) -> LabelQuery:
        """The quantity that is added, in the form that the data need."""
        return LabelQuery(quantity=self.adds, attributes=self.attributes, lowest=self.lowest, highest=self.highest)

    def log_prob(self, scores: Sequence[float], levels: Sequence[float]) -> float:
        """log P(a|x,y) in nats of these levels (MISSING: free) by the attribute model's scores. Raises ValueError for other lengths."""
        asked = [self._probability(score, level) for score, level in zip(scores, levels, strict=True) if level != MISSING]
        return sum(math.log(max(one, sys.float_info.min)) for one in asked)  # far from the score, with a large c, floats end

    def _probability(self, score: float, level: float) -> float:
        span = self.highest - self.lowest
        r = min(max((score - self.lowest) / span, EDGE), 1 - EDGE)
        low, high = (min(max((level + side - self.lowest) / span, 0.0), 1.0) for side in (-0.5, 0.5))
        return beta_mass(low, high, self.concentration * r, self.concentration * (1 - r))


def beta_mass(low: float, high: float, alpha: float, beta: float) -> float:
    """Mass of a Beta(alpha, beta) distribution between `low` and `high`, from 0 to 1; accurate in the tails too."""
    if high <= alpha / (alpha + beta):
        return _below(high, alpha, beta) - _below(low, alpha, beta)
    if low >= alpha / (alpha + beta):  # from the other end: 1 minus 1 has no digits
        return _below(1 - low, beta, alpha) - _below(1 - high, beta, alpha)
    return 1 - _below(low, alpha, beta) - _below(1 - high, beta, alpha)


def _below(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), from its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _below(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    return front / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)) by Lentz's method; its terms go to 0 fast. Raises ArithmeticError if they do not."""
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, MOST_TERMS):
        m = term // 2
        if term % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + numerator * d)
        c = 1 + numerator / c
        value *= c * d
        if abs(c * d - 1) < SMALL:
            return value
    raise ArithmeticError(f"the incomplete beta function at x={x}, a={a}, b={b} is not found in {MOST_TERMS} terms")


COLUMNS = (
    Column("records", "data/records", ".0f"),
    Column("log-prob", "proposals/log_prob", ".2f"),
    Column("spread", "proposals/spread", ".2f"),
)
Row = tuple[SupervisedExample, tuple[float, ...]]  # a response, the levels that are asked of it
LogProbs = Callable[[Sequence[Row]], list[float]]  # every rank calls it


@dataclass(kw_only=True, slots=True)
class WriteProposals(WritingRun):
    """A log-prob for each of several sampled responses, for SteerLM 2 (conf/proposals/proposals.yaml)."""

    data: SampledDataConfig = field(default_factory=SampledDataConfig)
    algorithm: ProposalsConfig = field(default_factory=ProposalsConfig)
    server_client: ClientConfig = field(default_factory=ClientConfig)

    def __post_init__(self) -> None:
        WritingRun.__post_init__(self)
        adds = self.algorithm.adds
        if self.data.apply_chat_template and adds is not Quantity.response:
            raise ConfigError(f"data.apply_chat_template=true: {adds.field} is of SteerLM's format; allowed: with algorithm.adds=response")

    def traits(self) -> Traits:
        if self.algorithm.adds is Quantity.attributes:
            return self.pass_traits((Phase.scores,), rows=self.algorithm.part_size, head=Head.scalar)
        return self.pass_traits((Phase.logprobs,), rows=self.algorithm.part_size)

    def read(self, location: str, tokenizer: Tokenizer, *, first: int | None = None) -> tuple[Sequence[Any], LoadReport]:
        return load_sampled(location, self.data, tokenizer, self.algorithm.query, first=first)


def build(job: WriterJob[WriteProposals]) -> int:
    """Sampled responses with `algorithm.adds` more. All log-probs are at temperature 1, as the trainer's are."""
    config = job.config
    groups = job.load(load_sampled, config.algorithm.query)
    what = [(group.record, [row.tokens for row in group.rows]) for group in groups]
    made_of = {"settings": repr(asdict(config.algorithm)), "data": digest_of(what)}
    with _scorer(job) as log_probs:
        return job.write_parts(groups, partial(_add, config, log_probs), made_of=made_of)


@contextmanager
def _scorer(job: WriterJob[WriteProposals]) -> Iterator[LogProbs]:
    """What gives the log-prob that is added: an attribute model, here or served, or a language model."""
    if job.config.algorithm.adds is Quantity.attributes:
        with job.attribute_scorer() as scores:
            yield lambda rows: _of_attributes(job.config, scores([row.tokens for row, _ in rows]).tolist(), rows)
        return
    policy, pad_id = job.policy(), job.tokenizer.pad_id
    yield lambda rows: policy.logprobs(supervised_batch([row for row, _ in rows], pad_id)).double().sum(dim=1).tolist()


def _add(config: WriteProposals, log_probs: LogProbs, part: int, groups: Sequence[SampledGroup]) -> tuple[list[Record], dict[str, float]]:
    """The records of these groups, and how much the responses differ: if they do not, their weights are equal."""
    size, adds = config.algorithm.batch_size, config.algorithm.adds
    rows = [(row, group.levels) for group in groups for row in group.rows]
    found = [one for start in range(0, len(rows), size) for one in log_probs(rows[start : start + size])]
    for (row, _), one in zip(rows, found, strict=True):
        if not math.isfinite(one):
            raise DataError(f"{row.source}: {adds.field} of a response is {one}: the model of model.path gives no finite number")
    remaining = iter(found)
    each = [[next(remaining) for _ in group.rows] for group in groups]
    records: list[Record] = [group.with_log_probs(adds, own) for group, own in zip(groups, each, strict=True)]
    spread = sum(max(own) - min(own) for own in each) / len(each)
    return records, {"proposals/log_prob": sum(found) / len(found), "proposals/spread": spread}


def _of_attributes(config: WriteProposals, scores: Sequence[Sequence[float]], rows: Sequence[Row]) -> list[float]:
    found = []
    for own, (row, levels) in zip(scores, rows, strict=True):
        if not all(map(math.isfinite, own)):
            raise DataError(f"{row.source}: the attribute model's scores of a response are {list(own)}, expected finite numbers")
        found.append(config.algorithm.log_prob(own, levels))
    return found


RECIPE = Recipe(name="proposals", config=WriteProposals, build=build, columns=COLUMNS)
