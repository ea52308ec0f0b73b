"""How long responses are, and how long a rollout engine samples them: a replica's queue, event by event. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

Step = Callable[[int, float], float]  # (active, cached): seconds of one decode step of so many sequences with so many tokens in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLengths:
    """Log-normal lengths of responses in tokens, cut where the run cuts them; their mean is `mean` after the cut. `prompt`: the mean of
    the prompts' lengths, 0 where they are as long as they may be. `measured` lengths, if there are any, take the place of log-normal
    ones."""

    mean: float
    spread: float = 0.7  # standard deviation of the logarithm
    prompt: float = 0.0
    measured: tuple[int, ...] = ()  # rising

    def drawn(self, count: int, longest: int, seed: int = 0) -> list[int]:
        """`count` lengths of at most `longest`: evenly spaced quantiles in an order that is the same every time."""
        if self.measured:
            lengths = [min(longest, self.measured[(2 * number + 1) * len(self.measured) // (2 * count)]) for number in range(count)]
        else:
            lengths = list(_quantiles(self.mean, self.spread, count, longest))
        random.Random(seed).shuffle(lengths)
        return lengths


@lru_cache(maxsize=256)
def _quantiles(mean: float, spread: float, count: int, longest: int) -> tuple[int, ...]:
    normal = NormalDist()
    factors = [math.exp(spread * normal.inv_cdf((number + 0.5) / count)) for number in range(count)]

    def cut_mean(scale: float) -> float:
        return sum(min(longest, scale * factor) for factor in factors) / count

    low, high = 0.0, float(longest)
    while cut_mean(high) < mean and high < 1e6 * longest:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return tuple(max(1, min(longest, round(high * factor))) for factor in factors)


@dataclass(slots=True)
class _Request:
    number: int
    turns: list[int]  # tokens to sample in each turn that is left
    held: float  # tokens that are computed when it gets a seat: its prompt, and what was written before
    seated: int = 0  # decode step


class ReplicaQueue:
    """One replica of an engine with continuous batching: `seats` sequences at a time, whose keys and values share `capacity` tokens.

    Requests are seated in the order in which they came. If the cache runs out, the sequence that was seated last loses its seat, and its
    tokens are computed again when it gets another (as in `aligner.rollout.builtin.scheduler`). Between two events the batch stays as it is
    and its cache grows evenly, so these decode steps are taken at once. With `static` all seats are taken anew when all of a batch have
    ended.
    """

    def __init__(
        self, *, seats: int, capacity: float, step: Step, prefill: Callable[[float], float], seating: float = 0.0, static: bool = False
    ) -> None:
        self.seats, self.capacity, self.static = seats, capacity, static
        self._seating = seating  # seconds besides its tokens, each time a request gets a seat
        self._step, self._prefill = step, prefill
        self.now = 0.0  # seconds
        self.preempted = 0
        self._later: list[tuple[float, int, _Request]] = []  # when it comes, order
        self._waiting: deque[_Request] = deque()
        self._active: dict[int, _Request] = {}
        self._ends: list[tuple[int, int]] = []  # (decode step, number)
        self._steps = self._added = 0
        self._cached = 0.0

    @property
    def idle(self) -> bool:
        return not self._active and not self._waiting and not self._later

    def add(self, number: int, turns: Sequence[int], prompt: float, *, release: float = 0.0) -> None:
        """An episode that comes at `release`: so many tokens are sampled in each of its turns (one: a response)."""
        self._come(_Request(number, list(turns), prompt), release)

    def _come(self, request: _Request, moment: float) -> None:
        self._added += 1
        heapq.heappush(self._later, (moment, self._added, request))

    def wait_until(self, moment: float) -> None:
        """Nothing is sampled before `moment`: new weights arrive."""
        self.now = max(self.now, moment)

    def recompute(self) -> None:
        """Keys and values of the running responses are computed anew."""
        if self._active:
            self.now += self._prefill(self._cached)

    def until(self, limit: float = math.inf, *, pause: float = 0.0) -> list[tuple[float, int]]:
        """Sample until `limit` (or the first event behind it) or until nothing is left: (when, number) of the episodes that ended, by time.
        `pause`: seconds between two turns of an episode, without a seat."""
        ended: list[tuple[float, int]] = []
        while not self.idle and self.now < limit:
            if not self._active and not self._waiting:
                if self._later[0][0] >= limit:
                    break
                self.now = max(self.now, self._later[0][0])
            self._seat()
            if steps := self._steps_to_next_event(limit):
                active = len(self._active)
                self.now += steps * self._step(active, self._cached + active * steps / 2)
                self._steps += steps
                self._cached += steps * active
                ended += self._end(pause)
            else:
                self._preempt()
        return ended

    def _steps_to_next_event(self, limit: float) -> int:
        """Decode steps that nothing changes the batch in; 0 where the cache has no room for one."""
        active, steps = len(self._active), self._ends[0][0] - self._steps
        if active > 1:
            steps = min(steps, int((self.capacity - self._cached) / active))
        stop = min(limit, self._later[0][0]) if self._later and active < self.seats and not self.static else limit
        if steps > 1 and stop < math.inf:
            steps = min(steps, max(1, math.ceil((stop - self.now) / self._step(active, self._cached))))
        return steps

    def _seat(self) -> None:
        while self._later and self._later[0][0] <= self.now:
            self._waiting.append(heapq.heappop(self._later)[2])
        computed = 0.0
        while self._waiting and len(self._active) < self.seats and not (self.static and self._active and not computed):
            request = self._waiting[0]
            # Also one token of each in the next step: else it would lose its seat at once.
            if self._active and self._cached + request.held + len(self._active) + 1 > self.capacity:
                break
            self._waiting.popleft()
            request.seated = self._steps
            self._active[request.number] = request
            heapq.heappush(self._ends, (self._steps + request.turns[0], request.number))
            self._cached += request.held
            computed += request.held
            self.now += self._seating
        if computed:
            self.now += self._prefill(computed)

    def _end(self, pause: float) -> list[tuple[float, int]]:
        ended = []
        while self._ends and self._ends[0][0] == self._steps:
            request = self._active.pop(heapq.heappop(self._ends)[1])
            request.held += self._steps - request.seated
            self._cached -= request.held
            del request.turns[0]
            if request.turns:
                self._come(request, self.now + pause)
            else:
                ended.append((self.now, request.number))
        return ended

    def _preempt(self) -> None:
        last = self._active.pop(next(reversed(self._active)))
        self._ends.remove((last.seated + last.turns[0], last.number))
        heapq.heapify(self._ends)
        done = self._steps - last.seated
        last.turns[0] -= done
        last.held += done
        self._cached -= last.held
        self._waiting.appendleft(last)
        self.preempted += 1


def turns_of(length: int, turns: float, number: int) -> list[int]:
    """The tokens of an episode over its turns, whose mean number is `turns`: some have one more than others."""
    count = min(length, math.floor(turns) + (number * 0.6180339887 % 1 < turns % 1))
    share, rest = divmod(length, count)
    return [share + (place < rest) for place in range(count)]


def shares(lengths: Sequence[int], replicas: int) -> list[Sequence[int]]:
    """The responses of each replica: every so-manieth."""
    return [lengths[number::replicas] for number in range(min(replicas, len(lengths)))]
