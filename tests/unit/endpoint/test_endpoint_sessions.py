"""Calls over HTTP become those of sessions, whose keys decide; and nothing is left of 200 at a time."""

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
from fake_live_engine import END, ScriptedEngine, ask, chat, scripted, tokenizer_of, until

from aligner.endpoint.app import Endpoint
from aligner.endpoint.generation import choice_seed
from aligner.endpoint.sessions import KeptSessions
from aligner.rollout.engine.episodes import turn_seed
from aligner.types import SamplingConfig

Served = tuple[Endpoint, ScriptedEngine, KeptSessions]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    sessions = KeptSessions(max_calls=2)
    with scripted(tokenizer_of(tmp_path), lambda _: "fine", sessions=sessions) as (endpoint, engine):
        yield endpoint, engine, sessions


def two_of(sessions: KeptSessions) -> list[tuple[str, str]]:
    return [sessions.open(seed=seed, sampling=SamplingConfig(temperature=0.5)) for seed in (100, 7)]


def test_every_choice_is_recorded_before_it_is_answered(served: Served) -> None:
    endpoint, engine, sessions = served
    (one, key), (other, of_other) = two_of(sessions)
    status, _, body = ask(endpoint, "/v1/chat/completions", chat(n=2, seed=3, return_token_ids=True), key=of_other)
    answer, calls = json.loads(body), sessions.close(other).calls
    assert status == 200 and [call.session for call in calls] == [other] * 2
    assert {call.seed for call in calls} == {request.seed for request in engine.requests} == {7, choice_seed(7, 1)}  # the session's
    for call in calls:
        assert call.prompt == tuple(answer["prompt_token_ids"]) and call.messages == chat()["messages"]
        assert call.result.tokens[-1] == END and call.sampling.temperature == 0.5 and call.result.weight_version == 7
    ask(endpoint, "/v1/chat/completions", chat(seed=3, stream=True), key=key)
    ask(endpoint, "/v1/messages", chat(max_tokens=5), **{"X-Session-ID": one})  # the endpoint's own key speaks for any session
    ask(endpoint, "/v1/completions", {"prompt": "x"})
    assert sessions.num_recorded == 4 and [call.seed for call in sessions.close(one).calls] == [100, turn_seed(100, 2)]


def test_keys_of_sessions_speak_for_these_alone(served: Served) -> None:
    endpoint, engine, sessions = served
    (one, key), (other, of_other) = two_of(sessions)
    for named in (one, other):
        assert ask(endpoint, "/v1/chat/completions", chat(), key=key, **{"X-Session-ID": named})[0] == 200
    assert ask(endpoint, "/v1/chat/completions", chat(), key=key + "x")[0] == 401
    assert ask(endpoint, "/v1/messages", chat(max_tokens=5), key="", **{"x-api-key": of_other})[0] == 200
    # The key decides: clients put names of their own into the header.
    assert (len(sessions.close(one).calls), len(sessions.close(other).calls), len(engine.requests)) == (2, 1, 3)


def test_a_closed_session_is_told_in_the_clients_form(served: Served) -> None:
    endpoint, engine, sessions = served
    (busy, of_busy), (over, of_over) = two_of(sessions)
    for _ in range(2):
        assert ask(endpoint, "/v1/chat/completions", chat(), key=of_busy)[0] == 200
    sessions.reward(over, 1.0, None, done=True)
    for key, status, said in (
        (of_busy, 409, f"session {busy} has made environment.sessions.max_calls=2 calls"),
        (of_over, 410, f"session '{over}' has ended"),
    ):
        found, _, body = ask(endpoint, "/v1/messages", chat(max_tokens=5), key=key)
        assert found == status and json.loads(body)["error"]["message"].startswith(said)
        assert ask(endpoint, "/v1/chat/completions", chat(), key=key)[0] == status
    assert len(engine.requests) == 2


def test_a_response_that_ends_after_its_client_left_is_not_recorded(served: Served) -> None:
    endpoint, engine, sessions = served
    (_, key), (other, of_other) = two_of(sessions)
    engine.may_answer.clear()
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", body=json.dumps(chat()), headers={"Authorization": f"Bearer {key}"})
    until(lambda: bool(engine.requests))
    connection.close()
    until(lambda: bool(engine.cancelled))
    engine.may_answer.set()
    assert ask(endpoint, "/v1/chat/completions", chat(), key=of_other)[0] == 200
    assert sessions.num_recorded == len(sessions.close(other).calls) == 1


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
