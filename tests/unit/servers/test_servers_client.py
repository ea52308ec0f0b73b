"""The clients against a small HTTP server in this process that answers, breaks off or stays silent on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_critic import Disk, FakeServer, updated, value_batch
from training_jobs import eventually

from aligner.errors import RequestRejected, ServerTimeout, ServerUnreachable
from aligner.servers import wire
from aligner.servers.access import Access
from aligner.servers.client import CriticClient, RewardClient
from aligner.servers.config import ClientConfig, RequestLimits
from aligner.servers.kserve import HEADER_LENGTH, AnswerError, encode_response, read_request
from aligner.servers.ledger import Refused
from aligner.servers.link import ServiceLink, WorkerThreads, combine
from aligner.servers.registry import Publication, make_registration, registration_path
from aligner.types import FinishReason, Prompt, Rollout, TokenBatch

ACCESS = Access("0" * 64)
CONFIG = ClientConfig(
    discovery_timeout_seconds=0.2, recovery_timeout_seconds=0.2, rows_per_request=2, max_lost_servers=3, retry_delay_seconds=0.01
)
PATIENT = replace(CONFIG, discovery_timeout_seconds=20, recovery_timeout_seconds=20)
Arrays = dict[str, np.ndarray]
BREAK_OFF = 0
ENDPOINTS = {one.name: one for one in vars(wire).values() if isinstance(one, wire.Endpoint)}
LIMITS = RequestLimits(vocab_size=1 << 20, max_sequence_length=64)


class FakeHTTP:
    """Registered as `name`; `behave` gets the endpoint and the input arrays of each request, in order of arrival in `requests`.

    It returns the answer's arrays, an HTTP status, or 0 to break off the connection.
    """

    def __init__(self, services_dir: Path, name: str, behave: Callable[[str, Arrays], Arrays | int]) -> None:
        self.requests: list[tuple[str, Arrays]] = []
        self.behave = behave
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, "", b"{}")

            def do_POST(self) -> None:
                endpoint = self.path.split("/")[3]
                body = self.rfile.read(int(self.headers["Content-Length"]))
                arrays = read_request(ENDPOINTS[endpoint], LIMITS, self.headers[HEADER_LENGTH], body).arrays()
                fake.requests.append((endpoint, arrays))
                try:
                    answer = fake.behave(endpoint, arrays)
                except Refused as refused:
                    self._send(409, "", json.dumps({"error": str(AnswerError(str(refused)))}).encode())
                    return
                if isinstance(answer, dict):
                    headers, body = encode_response(answer, [(name, True) for name in answer])
                    self._send(200, headers[HEADER_LENGTH], body)
                elif answer:
                    text = json.dumps({"error": f"Traceback\n{AnswerError('operation failed on rank 1: x')}\n at:"})
                    self._send(answer, "", text.encode())
                else:
                    self.connection.shutdown(socket.SHUT_RDWR)

            def _send(self, status: int, header_length: str, body: bytes) -> None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that has given up
                    self.send_response(status)
                    if header_length:
                        self.send_header(HEADER_LENGTH, header_length)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.publication = Publication(services_dir, make_registration(name=name, role=name, num_ranks=1), heartbeat_seconds=60)
        self.registration = self.publication.ready(f"http://127.0.0.1:{self.http.server_address[1]}")

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.publication.withdraw()


class FakeCriticHTTP(FakeHTTP):
    """A critic whose model is one integer. `trouble` comes first: it returns what `behave` may return, or None for the critic's answer."""

    def __init__(self, services_dir: Path, disk: Disk | None = None) -> None:
        self.critic = FakeServer(disk or Disk())
        self.trouble: Callable[[str, Arrays], Arrays | int | None] = lambda endpoint, arrays: None
        super().__init__(services_dir, "critic", self._answer)

    def _answer(self, endpoint: str, arrays: Arrays) -> Arrays | int:
        answer = self.trouble(endpoint, arrays)
        return self.critic.handle(endpoint, arrays) if answer is None else answer

    def asked(self, *without: str) -> list[str]:
        return [endpoint for endpoint, _ in self.requests if endpoint not in without]


@pytest.fixture
def critic(tmp_path: Path) -> Iterator[FakeCriticHTTP]:
    server = FakeCriticHTTP(tmp_path)
    yield server
    server.close()


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., CriticClient]]:
    made: list[CriticClient] = []

    def make(config: ClientConfig = CONFIG, journal: str | None = "journal") -> CriticClient:
        folder = None if journal is None else tmp_path / journal
        made.append(CriticClient(tmp_path, config=config, access=ACCESS, run="run", journal=folder))
        return made[-1]

    yield make
    for client in made:
        client.close()


def doubled(endpoint: str, arrays: Arrays) -> Arrays | None:
    return {"values": arrays["tokens"].astype(np.float32) * 2} if endpoint == "critic_infer" else None


def tokens(rows: int) -> TokenBatch:
    return TokenBatch(tokens=torch.arange(rows * 2).reshape(rows, 2), lengths=torch.full((rows,), 2))


def in_order(*answers: Arrays | int | None, endpoint: str = "critic_train") -> Callable[[str, Arrays], Arrays | int | None]:
    """One of the answers for each request to the endpoint, then None."""
    left = list(answers)
    return lambda name, arrays: left.pop(0) if name == endpoint and left else None


def test_values_come_back_in_order_from_pieces(critic: FakeCriticHTTP, make_client) -> None:
    critic.trouble = doubled
    assert torch.equal(make_client().values(tokens(5)).result(10), torch.arange(10.0).reshape(5, 2) * 2)
    asked = [arrays for endpoint, arrays in critic.requests if endpoint == "critic_infer"]
    assert sorted(arrays["tokens"].shape[0] for arrays in asked) == [1, 2, 2]
    assert all(arrays["after"].tolist() == [b"start"] for arrays in asked)


def test_train_and_save_go_one_after_the_other(critic: FakeCriticHTTP, make_client) -> None:
    running: list[str] = []

    def behave(endpoint: str, arrays: Arrays) -> None:
        assert not running
        running.append(endpoint)
        time.sleep(0.02)
        running.pop()

    critic.trouble = behave
    client = make_client()
    futures = [client.train(value_batch(2), 1), client.train(value_batch(3), 2), client.save(2)]
    first = updated(1, value_batch(2))
    assert futures[0].result(10)["value/loss"] == first
    assert futures[1].result(10)["value/loss"] == updated(first, value_batch(3))
    assert futures[2].result(10) == "step 2"
    sent = [(endpoint, int(arrays["step"][0])) for endpoint, arrays in critic.requests if "step" in arrays]
    assert sent == [("critic_train", 1), ("critic_train", 2), ("critic_save", 2)]


def test_repetition_ends(critic: FakeCriticHTTP, make_client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says that it is well and fails again is given more time each time: it may not know yet that its Triton died."""
    critic.trouble = lambda endpoint, arrays: BREAK_OFF if endpoint == "critic_infer" else None
    pauses: list[float] = []
    pause = ServiceLink.pause
    monkeypatch.setattr(ServiceLink, "pause", lambda link, seconds: (pauses.append(seconds), pause(link, seconds))[1])
    with pytest.raises(
        ServerUnreachable, match=r"critic_infer: critic at http://127.0.0.1:\d+ .*RemoteDisconnected.*registration is alive"
    ):
        make_client().values(tokens(1)).result(10)
    assert critic.asked("critic_status") == ["critic_infer"] * 4  # max_lost_servers=3
    assert [seconds for seconds in pauses if seconds < 0.5] == [0.01, 0.02, 0.04]  # the others are of the thread that only looks


def test_a_critic_that_does_not_even_tell_its_status(critic: FakeCriticHTTP, make_client) -> None:
    critic.trouble = lambda endpoint, arrays: BREAK_OFF
    with pytest.raises(ServerUnreachable, match="critic_status: critic at .* never answered this client.*its registration is alive"):
        make_client().values(tokens(1)).result(10)


def test_an_error_answer_is_not_repeated(critic: FakeCriticHTTP, make_client) -> None:
    critic.trouble = in_order(400, endpoint="critic_infer")
    with pytest.raises(RequestRejected, match=r"^operation failed on rank 1: x \(critic at http"):
        make_client().values(tokens(1)).result(10)
    assert critic.asked("critic_status") == ["critic_infer"]


def test_a_server_that_is_busy_or_ends_is_asked_again(critic: FakeCriticHTTP, make_client) -> None:
    critic.trouble = in_order(429, 429, 503)
    assert make_client(PATIENT).train(value_batch(5), 1).result(10)["value/loss"] == updated(1, value_batch(5))
    # Twice busy, once ending; from the journal, and again for its answer.
    assert critic.asked("critic_status") == ["critic_train"] * 5 and critic.critic.ledger.count == 1


def test_a_silent_server_times_out(critic: FakeCriticHTTP, make_client) -> None:
    release = threading.Event()
    critic.trouble = lambda endpoint, arrays: release.wait(20) and None if endpoint == "critic_infer" else None
    impatient = make_client(replace(CONFIG, request_timeout_seconds=0.1, max_lost_servers=1))
    with pytest.raises(ServerTimeout, match=r"critic_infer: critic at .* did not answer within 0.1 s; it may still be working on it"):
        impatient.values(tokens(1)).result(10)
    release.set()
    assert critic.asked("critic_status") == ["critic_infer"] * 2


def test_closing_ends_pending_calls(critic: FakeCriticHTTP, make_client) -> None:
    release = threading.Event()
    critic.trouble = lambda endpoint, arrays: release.wait(20) and None
    client = make_client()
    pending = client.values(tokens(1))
    while not critic.requests:
        time.sleep(0.01)
    client.close()
    with pytest.raises(ServerUnreachable, match="this client was closed"):
        pending.result(10)
    release.set()


def test_a_critic_that_is_replaced_is_brought_to_where_the_client_is(critic: FakeCriticHTTP, make_client, tmp_path: Path) -> None:
    """Although nobody asks anything of it: another rank may be about to."""
    client = make_client(PATIENT)
    weight = 1
    for step in (1, 2):
        weight = updated(weight, value_batch(step))
        assert client.train(value_batch(step), step).result(10)["value/loss"] == weight
    critic.close()
    successor = FakeCriticHTTP(tmp_path)
    assert eventually(lambda: successor.critic.model.weight == weight)
    assert successor.asked() == ["critic_status", "critic_train", "critic_train"]
    other = make_client(PATIENT, journal=None)
    other.follow(client.mark)
    assert other.values(tokens(1)).result(10).tolist() == [[weight, weight]]
    successor.close()


def test_a_client_of_another_attempt_is_not_served(critic: FakeCriticHTTP, make_client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_ATTEMPT", "77.1")
    with pytest.raises(ServerUnreachable, match=r"stale: critic at .* belongs to attempt \(none\), this is attempt 77.1"):
        make_client().values(tokens(1)).result(10)


def rollouts() -> list[Rollout]:
    """Of one prompt token and 1, 3 and 2 response tokens."""
    return [
        Rollout(
            prompt=Prompt(id=0, tokens=(5,), source="x:1"),
            response=(6,) * count,
            logprobs=(0.0,) * count,
            finish_reason=FinishReason.length,
            policy_version=0,
            seed=0,
        )
        for count in (1, 3, 2)
    ]


def lengths(endpoint: str, arrays: Arrays) -> Arrays:
    return {"rewards": arrays["sequence_lengths"].astype(np.float32)}


def test_rewards(tmp_path: Path) -> None:
    server = FakeHTTP(tmp_path, "reward", lengths)
    client = RewardClient(tmp_path, config=CONFIG, access=ACCESS)
    assert client.score(rollouts()).result(10).rewards.tolist() == [2.0, 4.0, 3.0]  # prompt and response tokens
    by_rows = {arrays["tokens"].shape[0]: arrays["tokens"].tolist() for _, arrays in server.requests}
    assert by_rows == {2: [[5, 6, 0, 0], [5, 6, 6, 6]], 1: [[5, 6, 6]]}

    server.behave = lambda endpoint, arrays: {"rewards": np.repeat(arrays["sequence_lengths"], 2, axis=1).astype(np.float32)}
    with pytest.raises(RequestRejected, match="2 attributes per row"):
        client.score(rollouts()).result(10)
    summing = RewardClient(tmp_path, config=CONFIG, access=ACCESS, reduce=lambda scores: scores.sum(dim=1))
    assert summing.score(rollouts()).result(10).rewards.tolist() == [4.0, 8.0, 6.0]
    with pytest.raises(ValueError, match="no rollouts"):
        client.score([])
    client.close()
    summing.close()
    server.close()


def test_a_reward_server_that_is_replaced(tmp_path: Path) -> None:
    server = FakeHTTP(tmp_path, "reward", lengths)
    client = RewardClient(tmp_path, config=PATIENT, access=ACCESS)
    client.score(rollouts()).result(10)
    server.close()
    pending = client.score(rollouts())
    successor = FakeHTTP(tmp_path, "reward", lengths)
    assert pending.result(20).rewards.tolist() == [2.0, 4.0, 3.0]
    client.close()
    successor.close()
    assert not registration_path(tmp_path, "reward").exists()


def test_an_unclosed_client_does_not_keep_its_process(tmp_path: Path) -> None:
    """It waits for a server that never comes, for 1,000 s, while the main thread ends."""
    code = (
        "import sys, torch; from pathlib import Path; from aligner.servers.client import CriticClient;"
        "from aligner.servers.access import Access; from aligner.servers.config import ClientConfig; from aligner.types import TokenBatch;"
        "c = CriticClient(Path(sys.argv[1]), config=ClientConfig(discovery_timeout_seconds=1000), access=Access('0' * 64), run='x');"
        "c.values(TokenBatch(tokens=torch.ones(1, 1, dtype=torch.int64), lengths=torch.ones(1, dtype=torch.int64)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False).returncode == 0


def test_settings_import_no_arrays_and_clients_no_server_library() -> None:
    code = (
        "import sys, aligner.servers.config; print([m for m in ('torch', 'pytriton', 'numpy') if m in sys.modules]);"
        "import aligner.servers.client, aligner.servers.server;"
        "print([m for m in ('pytriton', 'tritonclient', 'gevent', 'grpc', 'megatron') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n[]\n"


def test_combine_keeps_order_and_fails_at_once() -> None:
    parts: list[Future] = [Future(), Future()]
    combined = combine(parts, lambda results: results)
    parts[1].set_result("b")
    assert not combined.done()
    parts[0].set_result("a")
    assert combined.result(0) == ["a", "b"]
    waiting: list[Future] = [Future(), Future()]
    failing = combine(waiting, lambda results: results)
    waiting[1].set_exception(KeyError("x"))
    assert isinstance(failing.exception(0), KeyError)
    waiting[0].set_result("late")
    assert isinstance(failing.exception(0), KeyError)


def test_a_lane_of_one_thread_keeps_order_and_survives_errors() -> None:
    threads, seen = WorkerThreads("test", 1), []
    first = threads.submit(lambda: seen.append(1))
    broken = threads.submit(lambda: 1 // 0)
    last = threads.submit(lambda: seen.append(2))
    last.result(10)
    assert first.done() and seen == [1, 2]
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    threads.close(10)
