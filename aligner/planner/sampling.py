"""How long a rollout engine samples where responses differ in length: a replica's queue, event by event. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

MAX_REPLICAS = 64  # that are followed; more have the same lengths over again


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLengths:
    """Log-normal lengths of responses in tokens, cut where the run cuts them; their mean is `mean` after the cut."""

    mean: float
    spread: float = 0.7  # standard deviation of the logarithm

    def drawn(self, count: int, longest: int) -> list[int]:
        """`count` lengths of at most `longest`: evenly spaced quantiles in an order that is the same every time."""
        normal = NormalDist()
        factors = [math.exp(self.spread * normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
        low, high = 0.0, float(longest)
        while self._mean(factors, high, longest) < self.mean and high < 1e6 * longest:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(factors, middle, longest) < self.mean else (low, middle)
        lengths = [max(1, min(longest, round(high * factor))) for factor in factors]
        random.Random(0).shuffle(lengths)
        return lengths

    @staticmethod
    def _mean(factors: Sequence[float], scale: float, longest: int) -> float:
        return sum(min(longest, scale * factor) for factor in factors) / len(factors)


def decode_seconds(lengths: Sequence[int], seats: int, prompt: int, step: Callable[[int, float], float]) -> float:
    """Seconds until one replica has sampled all responses, which take free seats in this order.

    `step(active, cached)`: seconds of one decode step of so many sequences with so many tokens in the cache. Between two ends the batch
    stays as it is and its cache grows evenly, so these steps are taken at once.
    """
    waiting, ends = list(reversed(lengths)), list[int]()
    starts_of_ends: dict[int, list[int]] = {}
    now, total, sum_of_starts = 0, 0.0, 0
    while waiting or ends:
        while waiting and len(ends) < seats:
            end = now + waiting.pop()
            heapq.heappush(ends, end)
            starts_of_ends.setdefault(end, []).append(now)
            sum_of_starts += now
        end = ends[0]
        cached = len(ends) * (prompt + (now + end) / 2) - sum_of_starts
        total += (end - now) * step(len(ends), cached)
        now = end
        while ends and ends[0] == now:
            heapq.heappop(ends)
        sum_of_starts -= sum(starts_of_ends.pop(now))
    return total


def slowest_replica(lengths: Sequence[int], replicas: int, seconds: Callable[[Sequence[int]], float]) -> float:
    """The longest that one of the replicas takes for its share: every so-manieth response."""
    return max(seconds(lengths[number::replicas]) for number in range(min(replicas, len(lengths), MAX_REPLICAS)))
