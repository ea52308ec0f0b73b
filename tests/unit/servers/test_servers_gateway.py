"""The gateway in this process, before a stand-in for Triton: protocol, limits, refusals and health."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from fake_triton import ENDPOINTS, LIMITS, FakeTriton, served
from malformed import MUTATIONS, Case, hold, is_open, malformed, right_requests, send
from training_jobs import eventually

from aligner.errors import ConfigError
from aligner.servers import gateway, intake
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.servers.gateway import Gateway
from aligner.servers.health import Health
from aligner.servers.kserve import HEADER_LENGTH, AnswerError, decode_response, encode_request

SECRET = "5e" * 32
ACCESS = Access(SECRET)
INFER = "/v2/models/critic_infer/infer"
TOKENS = {"tokens": np.array([[1, 2, 3]]), "sequence_lengths": np.array([[3]])}


@dataclass
class Served:
    gateway: Gateway
    fake: FakeTriton
    health: Health

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, secret: bool = True
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=20)
        try:
            connection.request(method, path, body=body, headers={**(headers or {}), **(ACCESS.headers() if secret else {})})
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def infer(self, arrays: dict[str, np.ndarray] = TOKENS) -> tuple[int, dict[str, str], bytes]:
        headers, body = encode_request(arrays, ("values",))
        return self.ask("POST", INFER, body, headers)


@contextmanager
def started(transport: str, folder: Path, **settings: float) -> Iterator[Served]:
    with served(folder, ACCESS, transport=transport, config=ServerConfig(**settings)) as parts:
        yield Served(*parts)


Serving = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(params=["pytriton", "http"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Serving:
    """A gateway with these settings, before either transport."""
    return partial(started, request.param, tmp_path)


def test_binary_and_json_mean_the_same(serving: Serving) -> None:
    with serving() as server:
        status, headers, body = server.infer()
        assert status == 200
        assert decode_response(headers[HEADER_LENGTH], body)["values"].tolist() == [[2.0, 4.0, 6.0]]
        inputs = [
            {"name": "sequence_lengths", "datatype": "INT64", "shape": [1, 1], "data": [3]},
            {"name": "tokens", "datatype": "INT64", "shape": [1, 3], "data": [[1, 2, 3]]},
        ]
        status, headers, body = server.ask("POST", INFER, json.dumps({"id": "9", "inputs": inputs}).encode())
        assert status == 200 and HEADER_LENGTH not in headers
        assert json.loads(body)["outputs"] == [{"name": "values", "shape": [1, 3], "datatype": "FP32", "data": [2.0, 4.0, 6.0]}]
        (_, first), (_, second) = server.fake.received
        assert {name: array.tolist() for name, array in first.items()} == {name: array.tolist() for name, array in second.items()}

        texts = [
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]} for name, text in (("prompts", "?"), ("responses", "hé"))
        ]
        wanted = {"inputs": texts, "parameters": {"binary_data_output": True}}
        status, headers, body = server.ask("POST", "/v2/models/reward_model/infer", json.dumps(wanted).encode())
        assert decode_response(headers[HEADER_LENGTH], body)["rewards"].tolist() == [[3.0]]


def test_malformed_requests_are_refused(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """1,200 of every kind; none gets as far as the queue."""
    with serving() as server:
        wrong, kinds = [], Counter()
        for case in malformed(seed=1, count=1200, secret=SECRET):
            status, content = send(server.gateway.port, case)
            kinds[case.label.split()[1]] += 1
            text = content.decode(errors="replace")
            if status not in case.status or "Traceback" in text or "File" in text or len(text) > 1500:
                wrong.append((case.label, status, text[:200]))
            elif case.method != "HEAD" and text.startswith("{"):
                assert json.loads(text)["error"]
        assert not wrong, f"{len(wrong)} of 1200, such as {wrong[:5]}"
        assert set(kinds) == {mutation.__name__ for mutation in MUTATIONS}
        assert server.fake.answered == []  # none was queued
        errors = capsys.readouterr().err
        assert "Traceback" not in errors and SECRET not in errors

        for endpoint, arrays in right_requests():
            headers, body = encode_request(arrays, endpoint.output_names)
            if endpoint.name != "critic_train":  # what is not in the queue is not answered by the fake either
                case = Case("", f"/v2/models/{endpoint.name}/infer", {**headers, "Authorization": f"Bearer {SECRET}"}, body)
                assert send(server.gateway.port, case)[0] == 200
        assert server.fake.answered == ["critic_infer", "reward_model"]


def test_large_requests_are_computed_beside_the_others(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LARGE_BYTES", 0)
    with serving() as server:
        status, headers, body = server.infer()
        assert (status, decode_response(headers[HEADER_LENGTH], body)["values"].tolist()) == (200, [[2.0, 4.0, 6.0]])
        status, _, body = server.infer({**TOKENS, "tokens": np.array([[1, 2, 100]])})
        assert (status, json.loads(body)["error"]) == (400, "critic_infer: tokens: ids from 1 to 100; allowed are 0 to 99")


def test_an_ending_server_answers_those_who_wait(serving: Serving) -> None:
    with serving() as server:
        server.fake.may_answer.clear()
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(server.infer) for _ in range(2)]
            while len(server.fake.received) < 2:
                time.sleep(0.01)
            server.fake.intake.close(AnswerError("server critic was told to end", status=503))
            for answer in answers:
                status, _, body = answer.result(20)
                assert (status, json.loads(body)["error"]) == (503, "server critic was told to end")
        server.fake.may_answer.set()
        assert server.infer()[0] == 503


def test_everything_but_liveness_needs_the_secret(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert server.ask("GET", "/v2/health/live", secret=False)[0] == 200
        for path in ("/v2", "/v2/health/ready", "/v2/models/critic_save", "/v2/models/critic_infer/ready", "/nowhere"):
            assert server.ask("GET", path, secret=False)[0] == 401
        status, headers, body = server.ask("POST", INFER, secret=False)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "the run's secret is missing or wrong" in json.loads(body)["error"]
        assert server.fake.received == []
        assert [server.ask("GET", path)[0] for path in ("/v2", "/v2/models/critic_save", "/nowhere")] == [200, 200, 404]
    assert capsys.readouterr().err.count("without the run's secret refused") == 1  # not a line for each


def test_metadata_names_every_tensor(serving: Serving) -> None:
    with serving() as server:
        described = json.loads(server.ask("GET", "/v2/models/critic_infer")[2])
        assert described["inputs"][:2] == [
            {"name": "tokens", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "sequence_lengths", "datatype": "INT64", "shape": [-1, 1]},
        ]
        assert described["outputs"] == [{"name": "values", "datatype": "FP32", "shape": [-1, -1]}]


def test_a_full_queue_asks_to_come_again(serving: Serving) -> None:
    with serving(max_requests=2) as server:
        server.fake.may_answer.clear()
        callers = [threading.Thread(target=server.infer) for _ in range(2)]
        for caller in callers:
            caller.start()
        while len(server.fake.received) < 2:
            time.sleep(0.01)
        assert json.loads(server.ask("GET", "/v2/health/ready")[2])["requests_waiting"] == 2
        status, headers, body = server.infer()
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "2 requests with" in json.loads(body)["error"] and "server.max_requests=2" in json.loads(body)["error"]
        server.fake.may_answer.set()
        for caller in callers:
            caller.join()
        assert server.infer()[0] == 200


def test_waiting_bodies_have_a_size_together(serving: Serving) -> None:
    """There is a place for one and almost another one of this size, though four requests may wait."""
    size = len(encode_request(TOKENS, ("values",))[1])
    with serving(max_requests=4, max_request_bytes=size, max_pending_bytes=2 * size - 1) as server:
        server.fake.may_answer.clear()
        caller = threading.Thread(target=server.infer)
        caller.start()
        while caller.is_alive() and not server.fake.received:
            time.sleep(0.01)
        status, headers, body = server.infer()
        server.fake.may_answer.set()
        caller.join()
        assert (status, headers["Retry-After"]) == (429, "1")
        assert f"1 requests with {size} bytes" in (error := json.loads(body)["error"]) and "server.max_pending_bytes=" in error
        assert server.infer()[0] == 200


def test_bodies_have_a_size_and_a_time(serving: Serving) -> None:
    with serving(max_request_bytes=1000, body_timeout_seconds=0.3) as server:
        status, _, body = server.infer({**TOKENS, "after": np.array([b"x" * 900], dtype=object)})
        assert status == 413 and "at most 1000 are allowed" in json.loads(body)["error"]
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\nAuthorization: {ACCESS.headers()['Authorization']}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.gateway.port), timeout=20) as slow:
            slow.sendall(head.encode() + b"{")
            answer = slow.recv(10000)
        assert b" 408 " in answer and b"1 of 400 bytes came in 0.3 s" in answer
        with socket.create_connection(("127.0.0.1", server.gateway.port), timeout=20) as polite:
            polite.sendall(head.encode()[:-2] + b"Expect: 100-continue\r\n\r\n")
            assert polite.recv(10000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        with socket.create_connection(("127.0.0.1", server.gateway.port), timeout=20) as leaving:
            leaving.sendall(head.encode())
        assert server.infer()[0] == 200  # the places of both are free again
        assert server.fake.answered == ["critic_infer"]


def test_connections_with_the_secret_are_limited(serving: Serving) -> None:
    header = "".join(f"{name}: {value}\r\n" for name, value in ACCESS.headers().items())
    with serving(max_connections=3) as server:
        held = hold(server.gateway.port, 3, f"GET /v2 HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        for connection in held:
            assert b" 200 " in connection.recv(1000)
        status, headers, body = server.ask("GET", "/v2")
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"] == "3 connections are open (server.max_connections); try again"
        held.pop().close()
        assert eventually(lambda: server.ask("GET", "/v2")[0] == 200)
        for connection in held:
            connection.close()


@pytest.mark.parametrize("first", [b"", b"POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: x\r\nX: "], ids=["silent", "slow"])
def test_a_flood_of_strangers_takes_no_place_from_the_run(serving: Serving, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(gateway, "STRANGER_SECONDS", 60.0)
    with serving(max_connections=4) as server:
        held = hold(server.gateway.port, 2 * gateway.STRANGERS, first)
        assert server.infer()[0] == 200
        assert eventually(lambda: sum(map(is_open, held)) <= gateway.STRANGERS)
        for connection in held:
            connection.close()


def test_strangers_have_little_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STRANGER_SECONDS", 0.2)
    header = "".join(f"{name}: {value}\r\n" for name, value in ACCESS.headers().items())
    with serving() as server:
        (known,) = hold(server.gateway.port, 1, f"GET /v2 HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        assert b" 200 " in known.recv(1000)
        (alive,) = hold(server.gateway.port, 1, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in alive.recv(1000)
        strangers = [alive, *hold(server.gateway.port, 2), *hold(server.gateway.port, 1, b"GET /v2 HT")]
        assert eventually(lambda: not any(map(is_open, strangers)))
        assert is_open(known)
        known.close()


def test_those_who_hold_most_are_shown_out_first() -> None:
    """Here every address is a number; the others' connections stay, though they are older."""
    places = gateway.Seats(10, None)
    cleared = []

    class Seat(gateway._Seat):
        __slots__ = ()

        def clear(self) -> None:
            cleared.append(self.connection)

    for number, address in enumerate(["node1", "flood", "flood", "node2", "flood"]):
        places._strangers[number] = Seat(address, number)
    for _ in range(3):
        places._show_out()
    assert cleared == [1, 2, 0]  # then all have one: the oldest
    assert places.trust(3) and not cleared.count(3)
    assert not places.trust(1) and places._trusted == {3}  # it has been shown out: nobody would tell when it ends


def test_a_stranger_that_is_shown_out_before_it_is_looked_after_is_closed() -> None:
    async def shown_out(ours: socket.socket) -> None:
        places = gateway.Seats(1, None)
        places._enter(object, ours, "flood")
        places._show_out()
        await asyncio.sleep(0.0)  # its task ends, which has not begun
        await asyncio.sleep(0.0)

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(b"G")
    asyncio.run(shown_out(ours))
    assert ours.fileno() == -1
    theirs.close()


def test_whoever_has_a_wrong_secret_is_hung_up_on(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STRANGER_SECONDS", 60.0)
    with serving() as server:
        (stranger,) = hold(server.gateway.port, 1, b"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0\r\n\r\n")
        answer = b""
        while part := stranger.recv(1000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 401 ") and answer.count(b"Connection: close") == 1
        stranger.close()


def test_open_files_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.resource, "getrlimit", lambda kind: (256, 1024))
    with pytest.raises(ConfigError, match=r"server.max_connections=1024: this process may open 1024 files \(ulimit -Hn\); 1792 are needed"):
        Gateway(ServerConfig(), ACCESS, ENDPOINTS, LIMITS, Health("critic", "1234", "", 1, config=ServerConfig()))


def fails_with(text: str):
    def interrupt(handler: BaseHTTPRequestHandler) -> bool:
        body = json.dumps({"error": text}).encode()
        handler.send_response(500)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return interrupt


def breaks_off(handler: BaseHTTPRequestHandler) -> bool:
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True


def test_tritons_own_words_stay_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started("pytriton", tmp_path) as server:
        server.fake.interrupt = fails_with("Traceback (most recent call last): secret/path.py")
        status, _, body = server.infer()
        assert (status, json.loads(body)["error"]) == (502, "critic_infer: Triton could not answer; see the server's log")
        assert "secret/path.py" in capsys.readouterr().err
        server.fake.interrupt = breaks_off
        status, _, body = server.infer()
        assert (status, json.loads(body)["error"]) == (
            502,
            "critic_infer: Triton closed the connection; whether the operation ran is unknown",
        )
        server.fake.interrupt = lambda handler: False
        status, _, body = server.infer({**TOKENS, "tokens": np.array([[1, 2, 100]])})
        assert (status, json.loads(body)["error"]) == (400, "critic_infer: tokens: ids from 1 to 100; allowed are 0 to 99")


def test_health_tells_the_truth() -> None:
    now = [1000.0]
    config = ServerConfig(round_limit_seconds=15, operation_limit_seconds=600)
    health = Health("critic", "1234", "77.0", 2, config=config, clock=lambda: now[0])
    assert (health.report(0, 0)["ready"], health.report(0, 0)["reason"]) == (False, "it is starting")
    health.pulse.round_done()
    now[0] += 15
    assert health.report(3, 1.0) == {
        "ready": True,
        "reason": None,
        "service": "critic",
        "incarnation": "1234",
        "attempt": "77.0",
        "num_ranks": 2,
        "last_round_seconds_ago": 15.0,
        "requests_waiting": 3,
        "operation": None,
    }
    health.pulse.begin(None)  # a no-op that some rank does not answer
    now[0] += 1
    assert health.report(0, 0)["reason"] == "not all ranks have answered for 16 s (server.round_limit_seconds=15)"
    health.pulse.begin("critic_train")
    now[0] += 600
    report = health.report(0, 0)
    assert report["ready"] and (report["operation"]["name"], report["operation"]["seconds"]) == ("critic_train", 600.0)
    now[0] += 1
    assert health.report(0, 0)["reason"] == "critic_train has run for 601 s (server.operation_limit_seconds=600)"
    health.pulse.round_done()
    now[0] += 10
    health.pulse.round_done()
    now[0] += 10  # 20 s without an operation
    assert health.report(1, 14.0)["ready"]  # it came late
    assert health.report(1, 30.0)["reason"] == (
        "for 20 s no request has reached the ranks, though some wait (server.round_limit_seconds=15)"
    )
    assert health.stuck(30.0) is None  # yet
    now[0] += 101
    assert health.stuck(119.0) is None
    assert health.stuck(130.0) == "for 121 s no request has reached the ranks, though some wait (server.stuck_limit_seconds=120)"
    health.pulse.begin("critic_train")  # it came out
    assert health.stuck(130.0) is None
    health.failure = lambda: "process 5 of Triton died"
    assert health.report(0, 0)["reason"] == "process 5 of Triton died"


def test_health_is_the_status_of_the_answer(serving: Serving) -> None:
    with serving() as server:
        status, _, body = server.ask("GET", "/v2/health/ready")
        assert (status, json.loads(body)["reason"]) == (503, "it is starting")
        server.health.pulse.round_done()
        assert [server.ask("GET", path)[0] for path in ("/v2/health/ready", "/v2/models/critic_infer/ready")] == [200, 200]
        server.health.failure = lambda: "process 5 of Triton died"
        assert [server.ask("GET", path)[0] for path in ("/v2/health/ready", "/v2/models/critic_infer/ready")] == [503, 503]
        status, _, body = server.infer()
        assert (status, json.loads(body)["error"]) == (503, "process 5 of Triton died")
