"""A rollout engine whose responses are sessions that agents play against an endpoint of their own process.

The leading rank of each replica runs the endpoint, and plays its share of the sessions in threads; the engine's thread answers the calls
that come in. A session is played again, dropped or ends the run where its agent fails: it never gets a reward of 0 for that. Its seed is
that of the prompt it is for, a retry's too: with another one, what is learnt from would be chosen by what agents survive.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from aligner.agents import AgentOutcome, Agents, ServerGone, SessionAccess
from aligner.endpoint.sessions import KeptSessions, Trace
from aligner.environments.config import OnSessionFailure, SessionsConfig
from aligner.environments.workers import Outcome, Workers
from aligner.errors import EngineError
from aligner.rewards.load import raised
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.live import LiveEngine
from aligner.types import Prompt, Rollout, SamplingConfig

LOST_RETRIES = 3  # of a session whose server has gone, whatever on_failure says
LEAST_FAILED = 4  # sessions of a replica's round that all failed: then it is not the sessions
_LOOK_SECONDS = 0.5


class Endpoint(Protocol):
    """The policy behind HTTP, within the context that it is."""

    url: str  # http://host:port

    def __enter__(self) -> Endpoint: ...

    def __exit__(self, *error: object) -> None: ...


OpenEndpoint = Callable[[LiveEngine, KeptSessions], Endpoint]


@dataclass(frozen=True, kw_only=True, slots=True)
class Playing:
    """How sessions are played. `needs_reward`: nothing but agents gives rewards. `title` names the agents in messages."""

    config: SessionsConfig
    num_workers: int
    model: str
    tokenizer_path: str
    needs_reward: bool
    title: str
    heartbeat: Callable[[], None] = lambda: None


class SessionEngine:
    """`aligner.protocols.RolloutEngine` over an engine without an environment. A replica's leading rank opens endpoint and `agents`."""

    def __init__(
        self,
        engine: PhasedEngine,
        playing: Playing,
        agents: Callable[[], Agents],
        open_endpoint: OpenEndpoint,
    ) -> None:
        self.engine, self.replica, self.capabilities, self.gate = engine, engine.replica, engine.capabilities, engine.gate
        self.refit, self.sleep, self.wake = engine.refit, engine.sleep, engine.wake
        self.playing = playing
        self.live = LiveEngine(engine)
        self.sessions = KeptSessions(max_calls=playing.config.max_calls)
        self.agents: Agents | None = None
        self.url = ""
        self._opened = ExitStack()
        if engine.replica.is_leader:
            self.agents = agents()
            self._opened.callback(self.live.close)
            self.url = self._opened.enter_context(open_endpoint(self.live, self.sessions)).url
            self._opened.callback(self.agents.close)

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One session per (prompt, seed), all rows of each together; with a `sampling` of its own (it is not trained on) its last row.

        A replica has a fixed share of them. Raises EngineError where a failure is to end the run, or if all of several sessions failed.
        """
        if not self.replica.is_leader:
            self.live.run(lambda: True)
            return
        count, number = len(prompts), self.replica.count
        share = [place for place in range(count) if place * number // count == self.replica.index]
        is_trained, sampling = sampling is None, sampling or self.engine.sampling
        tasks = {place: _Task(prompt=prompts[place], seed=seeds[place], sampling=sampling) for place in share}
        current = _Round(self, tasks)
        try:
            self.live.run(current.is_over)
        finally:
            current.close()
        if current.error is not None:
            raise current.error
        rows = [row for place in share for row in current.rows[place][0 if is_trained else -1 :]]
        if rows:
            yield rows

    def shutdown(self) -> None:
        """May be called twice."""
        self._opened.close()
        self.engine.shutdown()


@dataclass(slots=True)
class _Task:
    """A session to play, as often as it takes."""

    prompt: Prompt
    seed: int
    sampling: SamplingConfig
    retries: int = 0
    session: str = ""  # that is being played
    is_lost: bool = False  # with the server that played it


class _Round:
    """The sessions of one generation on one replica: one thread watches those that play them."""

    def __init__(self, owner: SessionEngine, tasks: dict[int, _Task]) -> None:
        assert owner.agents is not None  # this replica leads
        self._sessions, self._agents, self._url = owner.sessions, owner.agents, owner.url
        self._version, self._playing, self._tasks = owner.live.version, owner.playing, tasks
        self.rows: dict[int, tuple[Rollout, ...]] = {}
        self.error: Exception | None = None
        self._failures: list[str] = []
        self._is_closing, self._is_over = threading.Event(), threading.Event()
        limit = owner.playing.config.timeout_seconds or math.inf
        self._workers = Workers(num_workers=owner.playing.num_workers, timeout_seconds=limit, name="agents")
        self._thread = threading.Thread(target=self._watch, name="sessions", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether every session has ended, or the round has failed."""
        return self._is_over.is_set()

    def close(self) -> None:
        """End every session of this round."""
        self._is_closing.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            for place in self._tasks:
                self._workers.submit(place, partial(self._play, place))
            calls = self._sessions.num_recorded
            while len(self.rows) < len(self._tasks):
                if self._is_closing.is_set():
                    return
                for outcome in self._workers.outcomes(_LOOK_SECONDS):
                    self._settle(outcome)
                    self._playing.heartbeat()
                if calls != (calls := self._sessions.num_recorded):
                    self._playing.heartbeat()
            self._report()
        except Exception as error:  # raised in the engine's thread
            self.error = error
        finally:
            self._is_closing.set()  # what is not over yet asks no more: the engine's thread would wait for it
            self._workers.close()
            for task in self._tasks.values():
                self._end(task)
            self._is_over.set()

    def _play(self, place: int) -> tuple[AgentOutcome, Trace, str]:
        """In a worker's thread."""
        task, playing = self._tasks[place], self._playing
        session, key = self._sessions.open(seed=task.seed, sampling=task.sampling)
        task.session = session
        if self._is_closing.is_set():
            return AgentOutcome(), self._sessions.close(session), "the round has ended"
        access = SessionAccess(
            root_url=self._url,
            session=session,
            key=key,
            model=playing.model,
            seed=task.seed,
            sampling=task.sampling,
            tokenizer_path=playing.tokenizer_path,
        )
        try:
            outcome = self._agents.play(task.prompt, access)
        except ServerGone as error:
            outcome, task.is_lost = AgentOutcome(failed=str(error)), True
        except Exception as error:  # of an agent: a failed session
            outcome = AgentOutcome(failed=f"it raised {raised(error)}")
        trouble = self._sessions.trouble(session)
        return outcome, self._sessions.close(session), trouble

    def _settle(self, ended: Outcome) -> None:
        task, playing = self._tasks[ended.key], self._playing
        if ended.error is not None:
            raise ended.error
        if ended.late:
            seconds = playing.config.timeout_seconds
            limit = f"environment.sessions.timeout_seconds={seconds:g}"
            outcome, trace, trouble = AgentOutcome(), self._end(task), f"it has not ended within {limit}"
        else:
            outcome, trace, trouble = ended.value
        total = trace.total if outcome.reward is None else replace(trace, reward=outcome.reward).total
        why = outcome.failed or trouble
        if not why and not trace.calls:
            why = "it has asked the policy nothing"
        elif not why and total is None and playing.needs_reward:
            why = f"it gave no reward, and no reward function or model is named{'; ' * bool(outcome.said)}{outcome.said}"
        if why:
            self._failures.append(f"{playing.title}: the session of {task.prompt.source or task.prompt.id}: {why}")
            if len(self._failures) == 1:  # at once: a round of agents that all fail may take long
                print(f"warning: {self._failures[0]}", flush=True)
            most = LOST_RETRIES if task.is_lost else 0
            if playing.config.on_failure is OnSessionFailure.retry:
                most = max(most, playing.config.retries)
            if task.retries < most:
                task.retries, task.is_lost = task.retries + 1, False
                self._workers.submit(ended.key, partial(self._play, ended.key))
                return
            if playing.config.on_failure is OnSessionFailure.stop:
                raise EngineError(f"{self._failures[-1]} (environment.sessions.on_failure=stop)")
        rows = trace.rows(task.prompt, seed=task.seed, version=self._version, reward=None if why else total, failed=bool(why))
        counts: Counter[str] = Counter(
            sessions_calls=len(trace.calls),
            sessions_branches=len(rows) if trace.calls else 0,
            sessions_tokens_changed=trace.changed(),
            sessions_retries=task.retries,
            sessions_failed=bool(why),
            sessions_late=bool(ended.late),
        )
        counts.update({name: count for name, count in outcome.counts.items()})
        self.rows[ended.key] = (*rows[:-1], replace(rows[-1], counts={name: float(count) for name, count in counts.items()}))

    def _end(self, task: _Task) -> Trace:
        """The trace of a session that still runs, if it does: its calls are refused from now on, and its agent is stopped."""
        session, task.session = task.session, ""
        trace = self._sessions.close(session)
        if session:
            self._agents.stop(session)
        return trace

    def _report(self) -> None:
        lost = [rows for rows in self.rows.values() if rows[-1].failed]
        if len(lost) == len(self._tasks) >= LEAST_FAILED:
            raise EngineError(f"all {len(lost)} sessions of a round failed; the first: {self._failures[0]}")
        if self._failures:
            what = f"{len(self._failures)} sessions failed, {len(lost)} of {len(self._tasks)} are left out and counted"
            print(f"warning: {what} (environment.sessions.on_failure={self._playing.config.on_failure.value})", flush=True)
