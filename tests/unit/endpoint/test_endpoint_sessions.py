"""What the endpoint asks of sessions, and tells them: with a fake of them."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_live_engine import END, KEY, ScriptedEngine, ask, chat, scripted, tokenizer_of, until

from aligner.endpoint.app import Endpoint
from aligner.endpoint.generation import choice_seed
from aligner.endpoint.sessions import Call, KeptSessions, SessionClosed
from aligner.rollout.engine.episodes import turn_seed
from aligner.types import SamplingConfig


class FakeSessions:
    """Two sessions with keys of their own. `closed`: raised instead of a beginning."""

    def __init__(self) -> None:
        self.keys = {"key of a": "a", "key of b": "b"}
        self.begun: list[tuple[str, tuple[int, ...]]] = []
        self.calls: list[Call] = []
        self.rewards: list[tuple[str, float | None]] = []
        self.closed: SessionClosed | None = None

    def of_key(self, key: str) -> str | None:
        return self.keys.get(key)

    def settings(self, session: str, asked: SamplingConfig) -> SamplingConfig:
        return asked

    def begin(self, session: str, prompt: Sequence[int]) -> int | None:
        if self.closed is not None:
            raise self.closed
        self.begun.append((session, tuple(prompt)))
        return 100 if session == "a" else None

    def record(self, call: Call) -> None:
        self.calls.append(call)

    def reward(self, session: str, reward: float | None, turn: int | None, done: bool) -> int:
        self.rewards.append((session, reward))
        return 1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Endpoint, ScriptedEngine, FakeSessions]]:
    sessions = FakeSessions()
    with scripted(tokenizer_of(tmp_path), lambda _: "fine", sessions=sessions) as (endpoint, engine):
        yield endpoint, engine, sessions


def test_every_choice_is_recorded_before_it_is_answered(served: tuple[Endpoint, ScriptedEngine, FakeSessions]) -> None:
    endpoint, engine, sessions = served
    messages = chat()["messages"]
    status, _, body = ask(endpoint, "/v1/chat/completions", chat(n=2, seed=3, temperature=0.5, return_token_ids=True), key="key of b")
    answer = json.loads(body)
    assert status == 200 and [call.session for call in sessions.calls] == ["b", "b"]
    assert {call.seed for call in sessions.calls} == {3, choice_seed(3, 1)}
    for call in sessions.calls:
        assert call.prompt == tuple(answer["prompt_token_ids"]) == sessions.begun[0][1] and call.messages == messages
        assert call.result.tokens[-1] == END and call.sampling.temperature == 0.5 and call.result.weight_version == 7
    assert len(sessions.begun) == 1
    ask(endpoint, "/v1/chat/completions", chat(seed=3, stream=True), key="key of a")
    assert (sessions.calls[-1].session, sessions.calls[-1].seed, engine.requests[-1].seed) == ("a", 100, 100)  # the session's turn
    ask(endpoint, "/v1/messages", chat(max_tokens=5), **{"X-Session-ID": "c"})  # the endpoint's own key speaks for any session
    assert (sessions.calls[-1].session, sessions.begun[-1][0]) == ("c", "c")
    ask(endpoint, "/v1/completions", {"prompt": "x"})
    assert (sessions.calls[-1].session, sessions.calls[-1].messages, sessions.begun[-1][0]) == ("", None, "c")


def test_keys_of_sessions_speak_for_these_alone(served: tuple[Endpoint, ScriptedEngine, FakeSessions]) -> None:
    endpoint, engine, sessions = served
    assert ask(endpoint, "/v1/chat/completions", chat(), key="key of a", **{"X-Session-ID": "a"})[0] == 200
    assert ask(endpoint, "/v1/chat/completions", chat(), key="key of a", **{"X-Session-ID": "b"})[0] == 200
    assert [call.session for call in sessions.calls] == ["a", "a"]  # the key decides: clients put names of their own into the header
    assert ask(endpoint, "/v1/chat/completions", chat(), key="key of c")[0] == 401
    assert ask(endpoint, "/v1/messages", chat(max_tokens=5), key="", **{"x-api-key": "key of b"})[0] == 200
    assert len(engine.requests) == 3
    for key, session, status in ((KEY, "d", 200), ("key of b", "b", 200), ("key of b", "d", 403)):
        assert ask(endpoint, f"/sessions/{session}/reward", {"reward": 1.0}, key=key)[0] == status
    assert sessions.rewards == [("d", 1.0), ("b", 1.0)]
    assert ask(endpoint, "/sessions/d/reward", {"reward": 1.0}, key="wrong")[0] == 401


@pytest.mark.parametrize(("gone", "status"), [(True, 410), (False, 409)])
def test_a_closed_session_is_told_in_the_clients_form(
    served: tuple[Endpoint, ScriptedEngine, FakeSessions], gone: bool, status: int
) -> None:
    endpoint, engine, sessions = served
    sessions.closed = SessionClosed("session a has ended", gone=gone)
    found, _, body = ask(endpoint, "/v1/messages", chat(max_tokens=5), key="key of a")
    assert (found, json.loads(body)["error"]["message"]) == (status, "session a has ended") and not engine.requests
    assert ask(endpoint, "/v1/chat/completions", chat(), key="key of a")[0] == status


def test_a_response_that_ends_after_its_client_left_is_not_recorded(served: tuple[Endpoint, ScriptedEngine, FakeSessions]) -> None:
    endpoint, engine, sessions = served
    engine.may_answer.clear()
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", body=json.dumps(chat()), headers={"Authorization": "Bearer key of a"})
    until(lambda: bool(engine.requests))
    connection.close()
    until(lambda: bool(engine.cancelled))
    engine.may_answer.set()
    assert ask(endpoint, "/v1/chat/completions", chat(), key="key of b")[0] == 200
    assert [call.session for call in sessions.calls] == ["b"]


SESSIONS, TURNS = 200, 3


def ours() -> Counter[str]:
    """What is in memory of this package's objects."""
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects() if str(type(one).__module__).startswith("aligner."))


@pytest.mark.parametrize(("max_requests", "at_once"), [(256, SESSIONS), (32, 32)], ids=["all at once", "more than are admitted"])
def test_200_sessions_at_a_time_are_recorded_once_and_leave_nothing(tmp_path: Path, max_requests: int, at_once: int) -> None:
    """Two waves: who is not admitted asks again, no more than is admitted waits, and nothing is kept of a session that has ended."""
    sessions = KeptSessions(max_calls=TURNS)
    how = {"sessions": sessions, "max_requests": max_requests, "max_connections": 2 * SESSIONS}
    with scripted(tokenizer_of(tmp_path), lambda request: f"fine {len(request.tokens)}", **how) as (endpoint, engine):
        before = ours()
        for wave in range(2):
            opened = [sessions.open(seed=number, sampling=SamplingConfig()) for number in range(SESSIONS)]
            engine.may_answer.clear()
            playing = threading.Thread(target=lambda: asyncio.run(play_all(endpoint.url, opened)))  # noqa: B023 - it ends in the loop
            playing.start()
            until(lambda: len(engine.requests) == at_once)  # before any is answered
            assert len(endpoint._running) <= max_requests
            engine.may_answer.set()
            playing.join(120)
            assert not playing.is_alive() and len(engine.requests) == SESSIONS * TURNS
            assert sessions.num_recorded == (wave + 1) * SESSIONS * TURNS
            for number, (name, _) in enumerate(opened):
                trace = sessions.close(name)
                assert [call.seed for call in trace.calls] == [turn_seed(number, turn + 1) for turn in range(TURNS)]
                assert trace.parents() == [-1, 0, 1] and trace.reward == number and not trace.changed()
            del trace
            engine.requests.clear()
            until(lambda: ours() <= before)  # what earlier tests left may go meanwhile
        assert not engine.cancelled


async def play_all(url: str, opened: Sequence[tuple[str, str]]) -> None:
    """A session for each key, at the same time: turns of tokens, then a reward and its end."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def post(path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
            while True:
                async with client.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    assert answer.status == 429 and answer.headers["Retry-After"] == "1", await answer.text()
                await asyncio.sleep(0.2)

        async def play(number: int, name: str, key: str) -> None:
            tokens = [65 + number % 26] * (1 + number % 50)
            for _ in range(TURNS):
                said = await post("/inference/v1/generate", key, {"token_ids": tokens, "sampling_params": {"max_tokens": 20}})
                tokens = [*tokens, *said["choices"][0]["token_ids"], 10]
            await post(f"/sessions/{name}/reward", key, {"reward": number, "done": True})

        await asyncio.gather(*(play(number, *one) for number, one in enumerate(opened)))
