"""What the endpoint asks of sessions, and tells them: with a fake of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from fake_live_engine import END, KEY, ScriptedEngine, ask, chat, scripted, tokenizer_of, until

from aligner.endpoint.app import Endpoint
from aligner.endpoint.calls import SESSION, Call, SessionClosed
from aligner.endpoint.generation import choice_seed
from aligner.types import SamplingConfig


class FakeSessions:
    """Two sessions with keys of their own. `closed`: raised instead of a beginning."""

    def __init__(self) -> None:
        self.keys = {"key of a": "a", "key of b": "b"}
        self.begun: list[tuple[str, tuple[int, ...]]] = []
        self.calls: list[Call] = []
        self.rewards: list[tuple[str, float]] = []
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

    def routes(self) -> list[web.RouteDef]:
        async def reward(request: web.Request) -> web.Response:
            self.rewards.append((request[SESSION] or request.match_info["session"], (await request.json())["reward"]))
            return web.json_response({})

        return [web.post("/sessions/{session}/reward", reward)]


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
    for key in (KEY, "key of b"):
        assert ask(endpoint, "/sessions/d/reward", {"reward": 1.0}, key=key)[0] == 200
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
