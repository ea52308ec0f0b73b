"""Rounds of sessions over an engine on a stand-in's logits: equal to an environment's in process, and what happens when agents fail."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from fake_decoder import CONTEXT, RunEngine, generation_of
from fake_live_engine import post, tokenizer_of

from aligner.agents import AgentOutcome, SessionAccess
from aligner.agents.play import Playing, SessionEngine
from aligner.data.tokenizer import Tokenizer
from aligner.endpoint.app import Endpoint
from aligner.endpoint.requests import Model
from aligner.endpoint.sessions import KeptSessions
from aligner.environments.config import OnSessionFailure, SessionsConfig
from aligner.environments.environment import Observation, Turn
from aligner.environments.exchange import Converting, EnvironmentFollowUp, EnvironmentReward
from aligner.errors import EngineError
from aligner.online.collect import SampleRequest, Scorers, collect_all, response_metrics
from aligner.protocols import Replica
from aligner.rollout.engine.episodes import Conversing
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.work import WorkSharing
from aligner.rollout.live import LiveEngine
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import Prompt, Rollout, SamplingConfig

pytestmark = [pytest.mark.usefixtures("topology"), pytest.mark.cpu]
SAMPLING = SamplingConfig(max_response_length=30, stop_token_ids=[3])
PROMPTS = [Prompt(id=i // 2, tokens=(4 + i // 2,) * (1 + i // 2), source=f"data.jsonl:{i // 2 + 1}") for i in range(8)]
SEEDS = list(range(100, 108))


class Quiz:
    """As many tokens as the turn had, up to three; done when the turn had one token only, or with the third. Rewards are turns' lengths."""

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, state: None, turn: Turn) -> Observation:
        done = len(turn.tokens) == 1 or turn.number == 3
        heard = () if done else tuple(3 + token % 9 for token in turn.tokens[:3])
        return Observation(tokens=heard, done=done, reward=float(len(turn.tokens)), counts={"heard": float(len(heard))})


def phased(conversing: Conversing | None = None, replica: Replica | None = None) -> PhasedEngine:
    engine = RunEngine(generation_of(max_batch_size=4).run, CONTEXT)
    engine.replica = replica or Replica()
    return PhasedEngine(engine, SAMPLING, WorkSharing(Replica(), None), offload=False, conversing=conversing)


def in_process() -> list[Rollout]:
    converting = Converting(decode=lambda tokens: " ".join(map(str, tokens)), observe=lambda text, last: ())
    follow_up = EnvironmentFollowUp(Quiz(), converting, max_turns=3, timeout_seconds=20.0)
    engine = phased(Conversing(follow_up=follow_up))
    return sorted((one for part in engine.generate(PROMPTS, SEEDS) for one in part), key=lambda one: one.seed)


class Agent:
    """Plays the quiz over HTTP, in the limits that the engine keeps in process. `spoil(place, tokens)` may change what it sends back."""

    def __init__(self, spoil: Callable[[int, list[int]], list[int]] = lambda place, tokens: tokens, *, posts: bool = False) -> None:
        self.spoil, self.posts = spoil, posts
        self.stopped: list[str] = []
        self.accesses: list[SessionAccess] = []
        self.is_closed = False

    def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
        self.accesses.append(access)
        tokens, total, heard = list(prompt.tokens), 0.0, 0.0
        for number in range(1, 4):
            room = min(30, CONTEXT - len(prompt.tokens)) - (len(tokens) - len(prompt.tokens))
            asked = {"token_ids": tokens, "sampling_params": {"max_tokens": room, "temperature": 0.3}}
            status, answer = post(f"{access.root_url}/inference/v1/generate", access.key, asked)
            assert status == 200, answer
            (choice,) = answer["choices"]
            own = choice["token_ids"]
            told = Quiz().step(None, Turn(text="", tokens=tuple(own), number=number))
            if self.posts:
                post(f"{access.root_url}/sessions/{access.session}/reward", access.key, {"reward": told.reward, "turn": number})
            total, heard = total + told.reward, heard + told.counts["heard"]
            if told.done or choice["finish_reason"] == "length" or room - len(own) <= len(told.tokens):
                break
            tokens = self.spoil(prompt.id, [*tokens, *own, *told.tokens])
        return AgentOutcome(reward=None if self.posts else total, counts={"heard": heard})

    def stop(self, session: str) -> None:
        self.stopped.append(session)

    def close(self) -> None:
        self.is_closed = True


def sessions_of(agent, *, replica: Replica | None = None, needs_reward: bool = True, num_workers: int = 3, **settings) -> SessionEngine:
    playing = Playing(
        config=SessionsConfig(**settings),
        num_workers=num_workers,
        model="policy",
        tokenizer_path="/tokenizer",
        needs_reward=needs_reward,
        title="environment.command=['agent']",
    )
    return SessionEngine(phased(replica=replica), playing, lambda: agent, opened)


@functools.cache
def tokenizer() -> Tokenizer:
    """It has more tokens than the decoder."""
    with TemporaryDirectory() as folder:
        return tokenizer_of(Path(folder))


def opened(live: LiveEngine, sessions: KeptSessions) -> Endpoint:
    return Endpoint(Model(name="policy", tokenizer=tokenizer(), live=live), Access("0" * 64), ServerConfig(), sessions=sessions)


def played(engine: SessionEngine, sampling: SamplingConfig | None = None) -> list[Rollout]:
    try:
        return [one for part in engine.generate(PROMPTS, SEEDS, sampling) for one in part]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("posts", [False, True])
def test_sessions_are_the_episodes_of_the_same_environment_in_process(posts: bool) -> None:
    """Tokens, log-probs, turns, rewards and counts; whatever temperature the agent asks for."""
    agent = Agent(posts=posts)
    found, wanted = played(sessions_of(agent)), in_process()
    assert max(one.num_turns for one in wanted) == 3
    for mine, other in zip(found, wanted, strict=True):
        assert mine.counts.items() >= other.counts.items() and mine.counts["sessions_calls"] == other.num_turns
        rewards = [mark.reward if posts else 0.0 for mark in other.turns]
        assert [mark.reward for mark in mine.turns] == rewards
        turns = tuple(replace(mark, reward=reward) for mark, reward in zip(other.turns, rewards, strict=True))
        assert replace(mine, counts={}, finish_reason=other.finish_reason) == replace(other, counts={}, turns=turns)
    assert agent.is_closed and len({one.session for one in agent.accesses}) == 8
    access = agent.accesses[0]
    assert (access.model, access.tokenizer_path, access.base_url) == ("policy", "/tokenizer", f"{access.root_url}/v1")
    assert sorted(one.seed for one in agent.accesses) == SEEDS and access.key not in repr(access)


def changed(place: int, tokens: list[int]) -> list[int]:
    """Prompt 2's agent forgets the first sampled token."""
    return [*tokens[:3], *tokens[4:]] if place == 2 else tokens


def test_rows_of_one_session_are_collected_as_one_episode() -> None:
    engine = sessions_of(Agent(changed))
    seen: list[Rollout] = []

    class Judge(EnvironmentReward):
        def score(self, rollouts):
            seen.extend(rollouts)
            return super().score(rollouts)

    greedy = replace(SAMPLING, temperature=0.0)
    requests = [SampleRequest(prompts=PROMPTS, seeds=SEEDS), SampleRequest(prompts=PROMPTS[::2], seeds=SEEDS[::2], sampling=greedy)]
    collected, validated = collect_all(engine, requests, scorers=Scorers(reward=Judge(is_optional=True)))
    engine.shutdown()
    assert len(collected.episodes) == 8 < len(collected.rollouts) and len(seen) == 8 + 4  # the last row of each
    assert [row.seed for row in collected.rollouts] == [SEEDS[owner] for owner in collected.episodes.owner]
    assert collected.episodes.groups_of(2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for owner in range(8):
        rows = [row for row, one in zip(collected.rollouts, collected.episodes.owner.tolist(), strict=True) if one == owner]
        reward = sum(row.num_written for row in rows)
        assert [row.rows_left for row in rows] == list(range(len(rows)))[::-1] and {
            *collected.rewards[collected.episodes.owner == owner].tolist()
        } == {reward}
        assert len(rows) == (rows[-1].counts["sessions_calls"] if owner in (4, 5) else 1)
    assert len(validated.rollouts) == 4 and validated.episodes.are_single
    metrics = response_metrics(collected, 1.0)
    total = sum(row.counts["sessions_calls"] for row in collected.rollouts if not row.rows_left)
    assert metrics["rollout/sessions_calls"] == metrics["rollout/turns"] == total / 8
    assert metrics["rollout/sessions_branches"] == len(collected.rollouts) / 8 and metrics["rollout/sessions_failed"] == 0
    assert metrics["rollout/sessions_tokens_changed"] > 0


def test_each_replica_plays_its_share() -> None:
    parts = [played(sessions_of(Agent(), replica=Replica(index=index, count=3))) for index in range(3)]
    assert [[one.seed for one in part] for part in parts] == [SEEDS[:3], SEEDS[3:6], SEEDS[6:]]


class Broken(Agent):
    """Fails for the prompt 1 as `how` says, the first `times` times."""

    def __init__(self, how: str, times: int = 99) -> None:
        super().__init__()
        self.how, self.left = how, {100 + place: times for place in (2, 3)}
        self.ended: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
        outcome = super().play(prompt, access) if self.how != "asks nothing" or prompt.id != 1 else AgentOutcome(reward=1.0)
        if prompt.id != 1 or not self.left[access.seed]:
            return outcome
        self.left[access.seed] -= 1
        if self.how == "raises":
            raise OSError("no tools today")
        if self.how == "hangs":
            self.ended[access.session].wait(10)
        if self.how == "says so":
            return replace(outcome, failed="it gave up")
        return replace(outcome, reward=None) if self.how == "gives no reward" else outcome

    def stop(self, session: str) -> None:
        super().stop(session)
        self.ended[session].set()


WRONG = {
    "raises": "it raised OSError: no tools today",
    "hangs": "it has not ended within environment.sessions.timeout_seconds=1",
    "says so": "it gave up",
    "asks nothing": "it has asked the policy nothing",
    "gives no reward": "it gave no reward, and no reward function or model is named",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_session_that_fails_has_no_reward_and_is_said(how: str, capsys) -> None:
    timeout = {"timeout_seconds": 1.0 if how == "hangs" else 60.0}
    agent = Broken(how)
    found = played(sessions_of(agent, num_workers=8, **timeout))
    assert [one.failed for one in found] == [one.prompt.id == 1 for one in found]
    assert all((one.reward is None) == one.failed and one.counts["sessions_failed"] == one.failed for one in found)
    assert [one.counts["sessions_late"] for one in found] == [float(one.failed and how == "hangs") for one in found]
    assert all(bool(one.response) == (not one.failed or how != "asks nothing") for one in found)
    said = capsys.readouterr().out
    assert "2 sessions failed, 2 of 8 are left out and counted (environment.sessions.on_failure=drop)" in said
    assert f"environment.command=['agent']: the session of data.jsonl:2: {WRONG[how]}" in said
    with pytest.raises(EngineError, match=rf"the session of data.jsonl:2: {WRONG[how]}.*\(environment.sessions.on_failure=stop\)"):
        played(sessions_of(Broken(how), num_workers=8, on_failure=OnSessionFailure.stop, **timeout))
    scores = EnvironmentReward(is_optional=True).score(found).result()
    assert scores.valid.tolist() == [not one.failed for one in found]


def test_a_session_is_played_again_with_its_seed(capsys) -> None:
    agent = Broken("raises", times=2)
    found, wanted = played(sessions_of(agent, on_failure=OnSessionFailure.retry)), in_process()
    assert [one.response for one in found] == [one.response for one in wanted] and not any(one.failed for one in found)
    assert [one.counts["sessions_retries"] for one in found] == [0, 0, 2, 2, 0, 0, 0, 0]
    assert "4 sessions failed, 0 of 8 are left out" in capsys.readouterr().out
    found = played(sessions_of(Broken("raises"), on_failure=OnSessionFailure.retry, retries=1))
    assert [one.failed for one in found] == [one.prompt.id == 1 for one in found]


def test_a_reward_of_functions_needs_none_of_agents() -> None:
    found = played(sessions_of(Broken("gives no reward"), needs_reward=False))
    assert not any(one.failed for one in found) and [one.reward is None for one in found] == [one.prompt.id == 1 for one in found]

    class Ones:
        def score(self, rollouts):
            from fake_parts import done

            from aligner.types import Scores

            return done(Scores.of(torch.ones(len(rollouts))))

    scores = EnvironmentReward(Ones(), is_optional=True).score(found).result()
    assert scores.valid.all() and scores.rewards.tolist() == [1.0 + (one.reward or 0.0) for one in found]


def test_if_all_fail_it_is_not_the_sessions() -> None:
    class Missing(Agent):
        def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
            raise FileNotFoundError("agent.py")

    with pytest.raises(EngineError, match="all 8 sessions of a round failed; the first: .* it raised FileNotFoundError: agent.py"):
        played(sessions_of(Missing()))


def test_an_engine_that_fails_ends_the_round_and_its_agents() -> None:
    agent = Agent()
    engine = sessions_of(agent, num_workers=1)

    def fail(*_) -> None:
        time.sleep(0.2)
        raise RuntimeError("no memory")

    engine.live.run = fail
    with pytest.raises(RuntimeError, match="no memory"):
        next(engine.generate(PROMPTS, SEEDS))
    assert len(agent.accesses) == 1 and agent.stopped == [agent.accesses[0].session]
    engine.shutdown()
    engine.shutdown()
