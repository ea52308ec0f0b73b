"""Asynchronous rollouts: the next rounds are sampled in a thread of every rank while the policy trains on this one.

The sampler has its own weights, which are replaced after every training step: between two decode steps of the current round (its
responses continue with the new weights: partial rollouts, AReaL 2505.24298, PipelineRL 2509.19128), or when the round has ended.
The age of rollouts is bounded by the rounds that the thread may start. With `taken` rounds taken, round r may start if

    r <= taken + 1 + max_staleness - (1 while a step is under way)

Each step takes at least one round and each step makes the weights one step older, so the oldest token of a round is at most `max_staleness`
training steps older than the policy that learns from it. The difference is corrected for by `algorithm.correction` (the decoupled objective
of AReaL): the log-probs that ratios are taken against are the trainer's, from before the step, the importance weight is theirs over the
sampler's.

All ranks begin, hold and end rounds at the same points of the main thread's program; the thread itself meets no other replica.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from aligner.errors import EngineError
from aligner.loop.loop import Clock
from aligner.online.collect import PendingRollouts, SampleRequest, ScoredRollouts, finish, start, with_values
from aligner.online.rollout_source import RolloutSource, sample_requests, with_baselines
from aligner.online.task import OnlineTask
from aligner.parallel import platform
from aligner.parallel.collectives import together
from aligner.rollout.config import AsynchronousConfig
from aligner.rollout.engine.gate import Gate
from aligner.servers.link import WorkerThreads

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    """A round that the thread has been asked for."""

    number: int
    requests: Sequence[SampleRequest]
    parts: Future[list[PendingRollouts]]


class AsyncRolloutSource(RolloutSource):
    """Samples ahead. Every rank constructs one, over the engine whose `gate` this is.

    The critic is asked for values when a round is taken; not while it is sampled, since it learns meanwhile. `last`: the last round that
    any step can take; None: not known.
    """

    def __init__(
        self,
        task: OnlineTask,
        group_size: int,
        config: AsynchronousConfig,
        gate: Gate,
        *,
        last: int | None = None,
        **sampled: Any,
    ) -> None:
        super().__init__(task, group_size, **sampled)
        self._config = config
        self._gate = gate
        self._last = last
        self._in_flight: deque[_Flight] = deque()
        self._asked = self._taken = 0  # numbers of rounds
        self._is_in_step = False
        self._steps = 0  # of training since the start or the checkpoint
        self._made_by = {0: 0}  # these, by the version of the weights that they made
        self._stream = platform.SideStream()
        self._thread = WorkerThreads("rollouts", 1)
        atexit.register(self.close)  # a thread that is inside torch while the interpreter goes away aborts the process

    def take(self, step: int, clock: Clock) -> ScoredRollouts:
        """The next round; waits for it if it is not sampled yet. Raises EngineError if that takes longer than the configured time."""
        number = self._cursor.next(step)
        self._leave_out_before(number)
        self._ask()
        flight = self._in_flight.popleft()
        assert flight.number == number
        with clock.phase("generate"):
            collected = self._collected(flight)
        self._taken, self._is_in_step = number, True
        self._ask()
        return replace(collected, ages=self._ages(collected))

    def trained(self, version: int) -> None:
        self._is_in_step = False
        self._steps += 1
        self._made_by[version] = self._steps
        self._made_by = {old: step for old, step in self._made_by.items() if step >= self._steps - self._config.max_staleness}
        if not self._config.partial:
            together(self._gate.drain, "waiting for the round under way", error=EngineError)
        super().trained(version)

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        """Rounds in flight are not part of the state: a resumed run samples them again, from the checkpoint's weights."""
        self._made_by = {version: self._steps}
        super().load_state(state, version)

    def close(self) -> None:
        """End the thread; a round under way is given up before its next step. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._gate.stop()
        self._thread.close(CLOSE_SECONDS)

    def _leave_out_before(self, number: int) -> None:
        """Steps that were left out leave out their rounds. A round that is in flight all the same is sampled for nothing."""
        while self._in_flight and self._in_flight[0].number < number:
            self._in_flight.popleft()
        self._taken = number - 1
        self._asked = max(self._asked, self._taken)

    def _ask(self) -> None:
        limit = self._taken + 1 + self._config.max_staleness - self._is_in_step
        if self._last is not None:
            limit = min(limit, max(self._last, self._taken + 1 - self._is_in_step))
        while self._asked < limit:
            self._asked += 1
            requests = sample_requests(self._task, self._asked, self._group_size, greedy=self._greedy)
            self._gate.expect()
            self._in_flight.append(
                _Flight(number=self._asked, requests=requests, parts=self._thread.submit(lambda requests=requests: self._run(requests)))
            )

    def _run(self, requests: Sequence[SampleRequest]) -> list[PendingRollouts]:
        try:
            with self._stream.current():
                return [start(self._task.engine, one, self._task.scorers()) for one in requests]
        finally:
            self._gate.ended()

    def _collected(self, flight: _Flight) -> ScoredRollouts:
        parts = together(lambda: self._sampled(flight), f"sampling round {flight.number}", error=EngineError)
        scorers = self._task.scorers(self._critic)
        if self._critic is not None:
            parts = [with_values(part, self._critic, scorers.pad_id) for part in parts]
        collected, *greedy = [finish(part, one, scorers) for part, one in zip(parts, flight.requests, strict=True)]
        return with_baselines(collected, greedy[0], self._group_size) if greedy else collected

    def _sampled(self, flight: _Flight) -> list[PendingRollouts]:
        seconds = self._config.timeout_seconds
        if not wait([flight.parts], seconds).done:
            raise EngineError(f"the thread `rollouts` has not sampled it within rollout.asynchronous.timeout_seconds={seconds:g}")
        return flight.parts.result()

    def _ages(self, collected: ScoredRollouts) -> torch.Tensor:
        """How many training steps oldest and newest token of each rollout are behind the current policy: int64 [B, 2]."""
        newest = [rollout.policy_version for rollout in collected.rollouts]
        oldest = [rollout.policy_version if rollout.oldest_version is None else rollout.oldest_version for rollout in collected.rollouts]
        ages = torch.tensor([[self._steps - self._made_by[version] for version in pair] for pair in zip(oldest, newest, strict=True)])
        assert ages.max() <= self._config.max_staleness, f"rollouts are {int(ages.max())} training steps old"
        return ages
