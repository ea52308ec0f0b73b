"""What comes over the endpoint's network besides good clients: the attacks on the servers' gateway (tests/unit/servers), bad requests of
every kind, clients that leave, do not read, or come all at once."""

from __future__ import annotations

import copy
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_live_engine import KEY, ScriptedEngine, ask, chat, scripted, tokenizer_of, until
from malformed import hold, is_open

from aligner.data.tokenizer import Tokenizer
from aligner.endpoint import app
from aligner.endpoint.app import INTERFACES, Endpoint
from aligner.errors import ConfigError
from aligner.servers import gateway

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARAMETERS = {"temperature": 1, "max_tokens": 4, "seed": 3, "logprobs": 1, "stop_token_ids": [7]}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": TOOLS, "tool_choice": "auto", "n": 2, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"],
        "logprobs": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.5, "top_k": 5, "return_token_ids": True,
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 5, "logprobs": 1, "echo": False, "stop_token_ids": [3], "min_p": 0.1, "n": 1},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": PARAMETERS},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "max_output_tokens": 5,
        "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "thinking": {"type": "disabled"},
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}],
    },
    "/tokenize": {"messages": [{"role": "user", "content": "u"}], "add_generation_prompt": True, "tools": TOOLS},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
ODD = (-1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, True, None, "", "x", "\x00", "../../etc/passwd", "a" * 5000, "%s%n")
ODD_PARTS = (
    [],
    [[]],
    [None],
    [1],
    ["x"],
    {},
    {"a": 1},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    [{"type": "text"}],
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[tuple[Endpoint, ScriptedEngine]]:
    with scripted(tokenizer, lambda _: "fine") as found:
        yield found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for name, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, name))


def mutated(source: random.Random) -> tuple[str, bytes]:
    path, right = source.choice(list(RIGHT.items()))
    body = copy.deepcopy(right)
    *outer, last = source.choice(list(places(body)))
    inside = body
    for name in outer:
        inside = inside[name]
    kind = source.randrange(4)
    if kind == 0 and isinstance(inside, dict):
        inside[source.choice(["path", "best_of", "a" * 4000, "", "suffix"])] = source.choice(ODD)
    elif kind == 1:
        del inside[last]
    else:
        inside[last] = copy.deepcopy(source.choice(ODD + ODD_PARTS))
    text = json.dumps(body).encode()
    if kind == 3:
        at = source.randrange(len(text))
        broken = (
            text[:at],
            text[:at] + b"NaN" + text[at + 1 :],
            text[:at] + source.randbytes(3) + text[at:],
            text.replace(b'"u"', b'"\\ud800"'),
        )
        text = source.choice([*broken, b"[" * 30000, b"null", b"", b'{"messages":' + b'{"a":' * 3000 + b"1" + b"}" * 3001, b"1" * 6000])
    return path, text


def test_no_bad_request_is_our_error(served: tuple[Endpoint, ScriptedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    """1,500 wrong requests: 400 and a reason in the client's form, or an ordinary answer where nothing is wrong with them."""
    endpoint, _ = served
    source, refused = random.Random(5), 0
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
    for path, right in RIGHT.items():
        assert ask(endpoint, path, right)[0] == 200, ask(endpoint, path, right)
    for _ in range(1500):
        path, body = mutated(source)
        connection.request("POST", path, body=body, headers={"x-api-key": KEY})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        assert answer.status in (200, 400), (path, body[:500], answer.status, document)
        if answer.status == 400:
            refused += 1
            error = document["error"]
            assert error["message"] and error["type"] == "invalid_request_error", document
            assert ("param" in error) == (path != "/v1/messages") and (document.get("type") == "error") == (path == "/v1/messages")
    connection.close()
    assert refused > 900
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("/v1/chat/completions", {"n": 0}, "n is 0, expected a number from 1 to 1024"),
        ("/v1/chat/completions", {"best_of": 2}, "best_of=2: every sampled response is returned; allowed: 1"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs=3: beside log-probs only; allowed: with logprobs=true"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice='required': the model cannot be made to call a tool"),
        ("/v1/chat/completions", {"response_format": {"type": "json"}}, "response_format={'type': 'json'}: responses are not held"),
        ("/v1/chat/completions", {"logit_bias": {"1": 2}}, "logit_bias={'1': 2}: tokens are drawn by the model's own logits; allowed: {}"),
        ("/v1/chat/completions", {"temperature": 1e-9}, "temperature is 1e-09, expected a number from 0.001 to 1000, or 0"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p=0.0: must be above 0 and at most 1 (1 is off)"),
        ("/v1/chat/completions", {"seed": 1 << 63}, "seed is 9223372036854775808, expected a number of 64 bits"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_completion_tokens is 0, expected at least 1"),
        ("/v1/chat/completions", {"stop": [""]}, "stop is [''], expected at most 64 texts that are not empty"),
        ("/v1/chat/completions", {"min_tokens": 2, "stop": "x"}, "min_tokens: not together with stop; allowed: one of them"),
        ("/v1/chat/completions", {"messages": []}, "messages is empty, expected at least one"),
        ("/v1/chat/completions", {"messages": [{"role": "judge", "content": "x"}]}, "field 'messages[0]': role is 'judge', allowed:"),
        ("/v1/completions", {"prompt": [[1, 999]]}, "prompt: 999 is no id of a token; there are 261"),
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt has 5000 tokens; this model's context of 4096 tokens leaves no room"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs=21: the likeliest tokens in each place; allowed: 0 to 20"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo: the log-probs of prompts are not known here"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id='r': no response is kept here"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens is missing"),
        ("/v1/completions", {"promt": "x"}, "prompt is missing; further fields are promt"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "assistant", "content": "x"}]}, "messages: the last one is the "),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(served: tuple[Endpoint, ScriptedEngine], path: str, more: dict[str, Any], said: str) -> None:
    status, headers, body = ask(served[0], path, (chat() if "chat" in path else {}) | more)
    assert (status, headers["X-Weight-Version"]) == (400, "7") and json.loads(body)["error"]["message"].startswith(said), body
    assert not served[1].requests


def test_paths_methods_and_keys(served: tuple[Endpoint, ScriptedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, engine = served
    assert ask(endpoint, "/health", method="GET", key="")[0] == 200
    for path in ("/v1/models", "/tokenizer_info", "/nowhere"):
        assert ask(endpoint, path, method="GET", key="")[0] == 401
    wrong = ("", KEY[:-1], KEY + "0", KEY.upper(), "x" * 3000, "\u00fc")
    for key in wrong:
        for path in INTERFACES:
            status, headers, body = ask(endpoint, path, chat(), **{"x-api-key": key.encode().decode("latin-1")}, key="")
            assert (status, headers["WWW-Authenticate"], headers["Connection"]) == (401, "Bearer", "close"), body
    assert ask(endpoint, "/v1/models", method="GET", key="", Authorization=f"Basic {KEY}")[0] == 401
    assert ask(endpoint, "/v1/chat/completions/../models", method="GET")[0] == ask(endpoint, "/v1//models", method="GET")[0] == 404
    status, headers, body = ask(endpoint, "/v1/chat/completions", method="GET")
    assert (status, headers["Allow"]) == (405, "POST") and json.loads(body)["error"]["message"].startswith("405")
    assert b"404: Not Found (GET /v1/nowhere)" in ask(endpoint, "/v1/nowhere", method="GET")[2]
    assert not engine.requests and KEY not in capsys.readouterr().err


def test_bodies_have_a_size_a_time_and_no_encoding(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, lambda _: "fine", max_request_bytes=1000, max_pending_bytes=1500, body_timeout_seconds=0.3) as (
        endpoint,
        engine,
    ):
        status, _, body = ask(endpoint, "/v1/chat/completions", chat("x" * 1000))
        assert status == 413 and "at most 1000 are allowed" in json.loads(body)["error"]["message"]
        assert ask(endpoint, "/v1/chat/completions", chat(), **{"Content-Encoding": "gzip"})[0] == 415
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as slow:
            slow.sendall(f"{head}Content-Length: 400\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(10000)
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as chunked:
            chunked.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n")
            assert b" 413 " in chunked.recv(10000)
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as leaving:
            leaving.sendall(f"{head}Content-Length: 900\r\n\r\n{{".encode())
            until(lambda: endpoint._pending_bytes == 900)
            assert ask(endpoint, "/v1/chat/completions", chat("x" * 700))[0] == 429  # no room for both
        until(lambda: endpoint._pending_bytes == 0)
        assert ask(endpoint, "/v1/chat/completions", chat())[0] == 200 and len(engine.requests) == 1


def test_too_many_requests_are_asked_to_come_again(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, lambda _: "fine", max_requests=2) as (endpoint, engine):
        engine.may_answer.clear()
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(ask, endpoint, "/v1/messages", chat(max_tokens=5)) for _ in range(2)]
            until(lambda: len(engine.requests) == 2)
            status, headers, body = ask(endpoint, "/v1/messages", chat(max_tokens=5))
            assert (status, headers["Retry-After"], json.loads(body)["error"]["type"]) == (429, "1", "rate_limit_error")
            assert ask(endpoint, "/v1/models", method="GET")[0] == 200
            engine.may_answer.set()
            assert [one.result()[0] for one in waiting] == [200, 200]
        assert ask(endpoint, "/v1/messages", chat(max_tokens=5))[0] == 200


def written(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_responses_along(tokenizer: Tokenizer, stream: bool) -> None:
    with scripted(tokenizer, lambda _: "word " * 500) as (endpoint, engine):
        engine.pause = 0.01
        if not stream:
            engine.may_answer.clear()
        body = json.dumps(chat(stream=stream, n=3, max_tokens=2000)).encode()
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as leaving:
            leaving.sendall(written(body))
            until(lambda: len(engine.requests) == 3)
            if stream:
                assert b" 200 " in leaving.recv(10000)
        until(lambda: len(engine.cancelled) == 3)
        until(lambda: not endpoint._running)


def test_a_client_that_does_not_read_is_dropped(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers stay bounded meanwhile: what the kernel takes, and the transport's."""
    monkeypatch.setattr(app, "WRITE_SECONDS", 0.5)
    with scripted(tokenizer, lambda _: "word " * 40000, context=400000) as (endpoint, engine):
        engine.pieces = 5
        body = json.dumps(chat(stream=True, max_tokens=390000, logprobs=True)).encode()
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect(("127.0.0.1", endpoint.port))
            idle.sendall(written(body))
            until(lambda: bool(engine.requests))
            until(lambda: not endpoint._running and not endpoint._seats._trusted)
        assert ask(endpoint, "/health", method="GET")[0] == 200


def test_strangers_have_little_time_and_known_clients_few_seats(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STRANGER_SECONDS", 0.3)
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with scripted(tokenizer, lambda _: "fine", max_connections=3) as (endpoint, _):
        known = hold(endpoint.port, 3, request)
        assert all(b" 200 " in connection.recv(1000) for connection in known)
        strangers = [
            *hold(endpoint.port, 2),
            *hold(endpoint.port, 1, b"GET /v1 HT"),
            *hold(endpoint.port, 1, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
        ]
        until(lambda: not any(map(is_open, strangers[:3])))
        assert all(map(is_open, known))
        status, headers, _ = ask(endpoint, "/v1/models", method="GET")
        assert (status, headers["Retry-After"]) == (429, "1")
        known.pop().close()
        until(lambda: ask(endpoint, "/v1/models", method="GET")[0] == 200)
        for connection in [*known, *strangers]:
            connection.close()


def test_an_ending_endpoint_answers_those_who_wait(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, lambda _: "fine") as (endpoint, engine):
        engine.may_answer.clear()
        known = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
        known.request("GET", "/v1/models", headers={"x-api-key": KEY})
        known.getresponse().read()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ask, endpoint, "/v1/chat/completions", chat())
            until(lambda: bool(engine.requests))
            ending = threading.Thread(target=endpoint.__exit__)
            ending.start()
            until(lambda: endpoint._is_ending)
            known.request("POST", "/v1/chat/completions", body=json.dumps(chat()), headers={"x-api-key": KEY})
            assert known.getresponse().status == 503
            engine.may_answer.set()
            assert waiting.result()[0] == 200
            ending.join()


def test_open_files_are_counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.resource, "getrlimit", lambda kind: (256, 1024))
    with pytest.raises(ConfigError, match=r"server.max_connections=1024: this process may open 1024 files"):
        with scripted(tokenizer, lambda _: "fine"):
            pass
