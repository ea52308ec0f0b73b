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
from collections.abc import Sequence
from dataclasses import dataclass

from aligner.algorithms.writing import AnnotateConfig
from aligner.data.labels import MISSING
from aligner.data.proposals import Quantity
from aligner.data.sampled import Sought
from aligner.errors import ConfigError

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
        if self.concentration <= 0:
            raise ConfigError(f"algorithm.concentration={self.concentration}: must be above 0")
        if self.served_by and self.adds is not Quantity.attributes:
            raise ConfigError(f"algorithm.served_by={self.served_by}: a server gives scores; allowed: with algorithm.adds=attributes")

    @property
    def sought(self) -> Sought:
        """What is added, as the data need to know it."""
        return Sought(quantity=self.adds, attributes=self.attributes, lowest=self.lowest, highest=self.highest)

    def log_prob(self, scores: Sequence[float], levels: Sequence[float]) -> float:
        """log P(a|x,y) of these levels (MISSING: free) by the attribute model's scores of a response, nats.

        Raises ValueError where there are more of the one than of the other.
        """
        asked = [self._probability(score, level) for score, level in zip(scores, levels, strict=True) if level != MISSING]
        return sum(math.log(max(one, sys.float_info.min)) for one in asked)  # far from the score, with a large c, floats end

    def _probability(self, score: float, level: float) -> float:
        span = self.highest - self.lowest
        r = min(max((score - self.lowest) / span, EDGE), 1 - EDGE)
        low, high = (min(max((level + side - self.lowest) / span, 0.0), 1.0) for side in (-0.5, 0.5))
        return beta_mass(low, high, self.concentration * r, self.concentration * (1 - r))


def beta_mass(low: float, high: float, alpha: float, beta: float) -> float:
    """What a Beta(alpha, beta) distribution has between `low` and `high`, 0 to 1; in the tails, too, with all of its digits."""
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
    """1 + d1/(1 + d2/(1 + ...)) by Lentz's method; its terms go to 0 fast. Raises ArithmeticError where they do not."""
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
