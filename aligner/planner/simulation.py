"""A run, step by step: what each component computes when, and what it waits for. Deterministic for a seed. Pure.

Replicas of the engine are followed event by event (`times.ReplicaQueue`). The servers process their responses in order of arrival; the
trainer takes a step's rollouts when all are sampled and scored. An asynchronous run (`docs/asynchronous.md`) samples a step's rollouts
before the earlier steps have ended: then sampler and trainer work at the same time, on GPUs of their own or on the same ones, where each
has `cluster.concurrency` of its speed while both compute.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from aligner.planner.config import ClusterConfig, PlanConfig
from aligner.planner.engine_memory import replicas_of
from aligner.planner.layers import GIGA
from aligner.planner.memory import Sizes
from aligner.planner.times import (
    MAX_REPLICAS,
    MILLI,
    ReplicaQueue,
    policy_away_seconds,
    refit_seconds,
    replica,
    sampled,
    shares,
    turn_seconds,
    turns_of,
)
from aligner.planner.workload import Component, Engine, Phase
from aligner.telemetry.spans import Span

SETTLING = 3  # steps, beyond the staleness, until the steps of an asynchronous run take equally long
SHOWN_REQUESTS = 400  # requests of a step that become spans
SLICE = 0.01  # part of a step (at least a second) that the replicas of a stream sample between two looks at their ends
MOST_TIMES = 100  # times its own duration, after which a run that fails too often is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A component with its sizes and the seconds of its phases."""

    component: Component
    sizes: Sizes
    seconds: Mapping[Phase, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """What a run does besides its steps, and how far its rollouts may be ahead."""

    max_staleness: int = 0
    partial: bool = True  # running responses continue with new weights
    recompute: bool = False  # their keys and values are then computed anew
    validate_every: int = 0
    save_every: int = 0
    save_minutes: float = 0.0
    saves_in_background: bool = False
    max_steps: int = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A simulated run. `phases`: seconds of an average step by what the trainer did or waited for; they add up to `step_seconds`."""

    phases: Mapping[str, float]
    useful: float  # part of the run's time that is not lost to failures
    run_seconds: float  # duration of the whole run, failures included; infinite if it never completes
    preemptions: int  # sequences of a step that lost their seats in the replicas that were followed
    spans: tuple[Span, ...] = field(default=(), repr=False)  # the last step's

    @property
    def step_seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class _Round:
    """Rollouts of one step."""

    seconds: float  # until all are sampled
    ends: Sequence[float]  # when each followed response was sampled
    weight: float  # responses that each of the followed ones stands for
    spans: Sequence[Span]


def simulate(parts: Sequence[Part], cluster: ClusterConfig, assumed: PlanConfig, habits: Habits, *, take_turns: bool) -> Simulated:
    """Simulate a run of `parts`, the training component first. `take_turns`: all compute on its GPUs, one after the other."""
    engine, kind = parts[0].component.engine, _Synchronous
    if engine is not None and habits.max_staleness:
        kind = _Streamed if engine.own_ranks and habits.partial else _Ahead
    return kind(parts, cluster, assumed, habits, take_turns).simulated()


class _Run(ABC):
    """The trainer's phases, the servers and what happens besides the steps, which are the same in all kinds of runs."""

    def __init__(self, parts: Sequence[Part], cluster: ClusterConfig, assumed: PlanConfig, habits: Habits, take_turns: bool) -> None:
        self.main = parts[0]
        own = [part for part in parts[1:] if part.component.within == self.main.component.name]
        self.residents, self.servers = own, [part for part in parts[1:] if part not in own]
        self.component, self.work = self.main.component, self.main.component.work
        self.cluster, self.assumed, self.habits, self.take_turns = cluster, assumed, habits, take_turns
        self.spans: list[Span] = []
        self.phases: dict[str, float] = {}
        self.preempted = 0
        self.is_shown = False

    @abstractmethod
    def steps(self) -> int:
        """Simulate; returns the number of steps whose times `phases` sums."""

    def simulated(self) -> Simulated:
        steps = self.steps()
        phases = {name: seconds / steps for name, seconds in self.phases.items()}
        step, habits = sum(phases.values()), self.habits
        if habits.validate_every and self.assumed.validation_responses:
            phases["validation"] = self._validation() / habits.validate_every
        if (saving := self._saving(step)) > 0:
            phases["checkpoints"] = saving
        useful, seconds = self._failures(sum(phases.values()))
        return Simulated(phases=phases, useful=useful, run_seconds=seconds, preemptions=self.preempted, spans=tuple(self.spans))

    @property
    def engine(self) -> Engine:
        assert self.component.engine is not None
        return self.component.engine

    # What the trainer does from `now`; each returns when it is done.

    def prepared(self, now: float) -> float:
        sequences = self.work.rows / max(1, self.component.dp)
        return self.does(now, "host work", self.cluster.step_seconds + self.cluster.sequence_milliseconds * MILLI * sequences)

    def refitted(self, now: float) -> float:
        engine = self.component.engine
        return self.does(now, "refit", refit_seconds(self.component, engine, self.main.sizes, self.cluster)) if engine else now

    def trained(self, now: float) -> float:
        """Passes without gradient, then training, while or (if they share GPUs) after the critic trains."""
        for phase in self.work.phases:
            if phase not in (Phase.generate, Phase.train):
                now = self.does(now, phase.value, self.main.seconds[phase])
        for part in self.residents:
            for phase, seconds in part.seconds.items():
                now = self.does(now, part.component.name if phase is Phase.train else phase.value, seconds)
        begun, now = now, self.does(now, Phase.train.value, self.main.seconds.get(Phase.train, 0.0))
        ends = now
        for part in self.servers:
            if seconds := part.seconds.get(Phase.train, 0.0):
                start = ends if self.take_turns else begun
                self.show("train", part.component.process, "rank 0", start, seconds)
                ends = max(ends, start + seconds)
        return self.waits(now, "waiting for the critic's training", ends)

    def scored(self, sampled: float, began: float, found: _Round) -> float:
        """Each server scores responses as they arrive, or all of them in its turn; reward functions run on the actor's ranks."""
        ends = sampled
        rows = self.work.rows + self.work.extra_rows
        for process in dict.fromkeys(part.component.process for part in self.servers):
            own = [part for part in self.servers if part.component.process == process]
            service = sum(seconds for part in own for phase, seconds in part.seconds.items() if phase != Phase.train)
            if self.take_turns:
                self.show("score", process, "rank 0", ends, service)
                ends += service
            elif service:
                done = _queued(found.ends, service / rows * found.weight)
                self.show("score", process, "rank 0", began + found.ends[0], done - found.ends[0])
                ends = max(ends, began + done)
        if self.assumed.reward_seconds:
            each = self.assumed.reward_seconds * found.weight / self.component.num_ranks
            ends = max(ends, began + _queued(found.ends, each))
        if self.take_turns and Phase.generate in self.component.turns:
            ends += turn_seconds(self.component, self.main.sizes, self.cluster, Phase.generate)
        return self.waits(sampled, "waiting for scores", ends)

    # sampling

    def round(self, number: int) -> _Round:
        """All rollouts of a step, if nothing else runs."""
        rows = self.work.rows + self.work.extra_rows
        ends: list[float] = []
        spans: list[Span] = []
        slowest, self.preempted = 0.0, 0
        lengths = self.work.responses(rows, self.assumed.seed + number)
        replicas = sampled(self.component, self.engine, self.main.sizes, self.cluster, lengths, self.assumed)
        lane_of = self.component.name if not self.engine.own_ranks else "engine"
        for place, (queue, own, found) in enumerate(replicas):
            ends += [moment for moment, _ in found]
            slowest = max(slowest, queue.now)
            self.preempted += queue.preempted
            if self.is_shown:
                shown = found[:: max(1, len(found) * len(replicas) // SHOWN_REQUESTS)]
                spans += [Span("response", lane_of, f"replica {place}", 0.0, end, {"tokens": own[request]}) for end, request in shown]
        return _Round(slowest, sorted(ends), rows / len(ends), spans)

    # Besides the steps

    def _validation(self) -> float:
        if self.component.engine is None:
            return 0.0
        responses = self.work.responses(self.assumed.validation_responses)
        found = sampled(self.component, self.engine, self.main.sizes, self.cluster, responses, self.assumed)
        return max(queue.now for queue, _, _ in found)

    def _steps_between_saves(self, step: float) -> float:
        """Steps between checkpoints by number or, if that is rarer, by time; infinite if the only checkpoint is at the end."""
        every, minutes = self.habits.save_every or math.inf, self.habits.save_minutes
        by_time = max(1, math.ceil(60 * minutes / step)) if minutes and step else math.inf
        return min(every, by_time)

    def _saving(self, step: float) -> float:
        """Seconds of a step for checkpoints of all that is trained. In the background they cost only what the steps until the next one by
        number do not cover: checkpoints by time wait until the last one has been written."""
        if math.isinf(between := self._steps_between_saves(step)):
            return 0.0
        size = sum(
            sum(state.optimizer for state in part.sizes.stages) * part.component.num_ranks // part.component.parallel.pp
            for part in (self.main, *self.residents, *self.servers)
            if part.component.optimizer is not None
        )
        seconds = size / (self.cluster.storage_gb_per_second * GIGA)
        if not self.habits.saves_in_background:
            return seconds / between
        return max(0.0, seconds / self.habits.save_every - step) if self.habits.save_every else 0.0

    def _failures(self, step: float) -> tuple[float, float]:
        """(useful part, seconds) of the whole run: nodes fail at random, and the steps since the last checkpoint are computed again."""
        alone, assumed = step * self.habits.max_steps, self.assumed
        if not assumed.node_mtbf_hours or not alone:
            return 1.0, alone
        ranks = sum(part.component.num_ranks for part in (self.main, *self.servers) if not part.component.within)
        own = self.component.engine.own_ranks if self.component.engine else 0
        nodes = math.ceil(((self.component.num_ranks if self.take_turns else ranks) + own) / self.cluster.gpus_per_node)
        between, saved = assumed.node_mtbf_hours * 3600 / nodes, step * min(self._steps_between_saves(step), self.habits.max_steps)
        draw, clock, done = random.Random(assumed.seed), 0.0, 0.0
        while True:
            lasts = draw.expovariate(1 / between)
            if done + lasts >= alone:
                clock += alone - done
                return alone / clock, clock
            clock += lasts + assumed.restart_minutes * 60
            done = math.floor((done + lasts) / saved) * saved
            if clock > MOST_TIMES * alone:
                return done / clock, math.inf

    # The record

    def does(self, now: float, name: str, seconds: float) -> float:
        if seconds > 0:
            self.phases[name] = self.phases.get(name, 0.0) + seconds
            self.show(name, self.component.name, "rank 0", now, seconds)
        return now + max(0.0, seconds)

    def waits(self, now: float, name: str, until: float) -> float:
        return self.does(now, name, until - now)

    def show(self, name: str, component: str, lane: str, start: float, seconds: float) -> None:
        if self.is_shown and seconds > 0:
            self.spans.append(Span(name, component, lane, start, seconds))


class _Synchronous(_Run):
    """Sample, score, train: one after the other."""

    def steps(self) -> int:
        varies = self.component.engine is not None and self.work.lengths is not None
        steps, now = self.assumed.steps if varies else 1, 0.0
        for number in range(steps):
            self.is_shown = number == steps - 1
            now = self.prepared(now)
            if self.component.engine is not None and Phase.generate in self.work.phases:
                now = self.refitted(now)
                away = policy_away_seconds(self.component, self.engine, self.main.sizes, self.cluster)
                found = self.round(number)
                self.spans += [replace(span, start=now) for span in found.spans]
                began, now = now, self.does(now, Phase.generate.value, found.seconds + away + self.cluster.phase_seconds)
                now = self.scored(now, began, found)
            elif Phase.generate in self.work.phases:
                now = self.does(now, Phase.generate.value, self.main.seconds[Phase.generate])
            now = self.trained(now)
        return steps


class _Ahead(_Run):
    """Round r is sampled, after the rounds before it, once step r - 1 - staleness is over; step r uses it when it is sampled and scored."""

    def steps(self) -> int:
        lag, total = self.habits.max_staleness, self.assumed.steps + self.habits.max_staleness + SETTLING
        speed = 1.0 if self.engine.own_ranks else self.cluster.concurrency
        done: list[float] = []  # when each step was over
        sampler = trainer = 0.0
        for number in range(total):
            self.is_shown = number == total - 1
            if number == total - self.assumed.steps:
                self.phases = {}
            begin = max(sampler, done[number - 1 - lag] if number > lag else 0.0)
            found = self.round(number)
            sampler = _beside(begin, found.seconds, trainer, speed)
            self.spans += [replace(span, start=begin) for span in found.spans]
            stretched = (sampler - begin) / found.seconds
            found = replace(found, seconds=sampler - begin, ends=[end * stretched for end in found.ends])
            now = self.waits(trainer, "waiting for rollouts", max(trainer, self._available(sampler, begin, found)))
            now = self.trained(self.prepared(now))
            if speed < 1 and lag:  # meanwhile the next round is sampled
                now = self.does(now, "shared with the sampler", min(now - trainer, found.seconds) * (1 - speed))
            trainer = self.refitted(now)
            sampler += trainer - now
            done.append(trainer)
        return self.assumed.steps

    def _available(self, sampled: float, began: float, found: _Round) -> float:
        """When the round is scored; the trainer has been waiting for that since it finished the round before."""
        phases = dict(self.phases)
        ends = self.scored(sampled, began, found)
        self.phases = phases
        return ends


class _Streamed(_Run):
    """Requests of the next rounds get the seats that become free in a round: no replica waits for the longest response of a round."""

    def steps(self) -> int:
        engine = self.engine
        lag, total = self.habits.max_staleness, self.assumed.steps + self.habits.max_staleness + SETTLING
        replicas = replicas_of(self.component, engine)
        static, sizes = self.assumed.static_batches, self.main.sizes
        queues = [replica(self.component, engine, sizes, self.cluster, static=static) for _ in range(min(replicas, MAX_REPLICAS))]
        per_replica = math.ceil((self.work.rows + self.work.extra_rows) / replicas)
        of_round = per_replica * len(queues)
        ended: dict[int, list[float]] = {}
        done: list[float] = []
        trainer = 0.0
        for number in range(total):
            self.is_shown = number == total - 1
            if number == total - self.assumed.steps:
                self.phases = {}
            for ahead in range(len(ended), number + lag + 1):
                ended[ahead] = []
                self._release(queues, ahead, per_replica, done[ahead - 1 - lag] if ahead > lag else 0.0)
            slice_seconds = max(1.0, SLICE * (done[-1] - done[-2])) if len(done) > 1 else 1.0
            while len(ended[number]) < of_round:
                limit = min(queue.now for queue in queues if not queue.idle) + slice_seconds
                for moment, request in (end for queue in queues for end in queue.until(limit, pause=self.assumed.environment_seconds)):
                    ended[request // of_round].append(moment)
            now = self.waits(trainer, "waiting for rollouts", max(trainer, *ended[number]))
            now = self.trained(self.prepared(now))
            trainer = self.refitted(now)
            for queue in queues:
                for moment, request in queue.until(now, pause=self.assumed.environment_seconds):
                    ended[request // of_round].append(moment)
                queue.now = max(queue.now, trainer)  # new weights arrive
                if self.habits.recompute:
                    queue.recompute()
            done.append(trainer)
        self.preempted = sum(queue.preempted for queue in queues) // total
        return self.assumed.steps

    def _release(self, queues: Sequence[ReplicaQueue], number: int, per_replica: int, moment: float) -> None:
        lengths = self.work.responses(per_replica * len(queues), self.assumed.seed + number)
        for place, (queue, own) in enumerate(zip(queues, shares(lengths, len(queues)), strict=True)):
            for request, length in enumerate(own):
                numbered = (number * len(queues) + place) * per_replica + request
                queue.add(numbered, turns_of(length, self.assumed.turns, request), self.work.mean_prompt, release=moment)


def _queued(arrivals: Sequence[float], service: float) -> float:
    """When a server has processed all requests, one after the other, each in `service` seconds; `arrivals` rise."""
    free = 0.0
    for arrival in arrivals:
        free = max(free, arrival) + service
    return free


def _beside(begin: float, seconds: float, busy_until: float, speed: float) -> float:
    """When work of `seconds` that began at `begin` is done, at `speed` while the other side is busy."""
    together = max(0.0, busy_until - begin)
    if together * speed >= seconds:
        return begin + seconds / speed
    return begin + together + seconds - together * speed
