"""The clients against a small HTTP server in this process that answers, breaks off or stays silent on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.errors import RequestRejected, ServerTimeout, ServerUnreachable
from aligner.servers.client import CriticClient, RewardClient
from aligner.servers.config import ClientConfig
from aligner.servers.kserve import HEADER_LENGTH, AnswerError
from aligner.servers.lane import Lane, combine
from aligner.servers.registry import Publication, make_registration, registration_path
from aligner.types import FinishReason, Prompt, Rollout, TokenBatch, ValueBatch

CONFIG = ClientConfig(
    discovery_timeout_seconds=0.1, rediscovery_timeout_seconds=0.1, rows_per_request=2, num_attempts=3, retry_delay_seconds=0.01
)


class FakeTriton:
    """Registered as `name`; `behave` gets the endpoint and the input arrays of each request, in order of arrival in `requests`."""

    def __init__(self, services_dir: Path, name: str) -> None:
        self.requests: list[tuple[str, dict[str, np.ndarray]]] = []
        self.behave: Callable[[str, dict[str, np.ndarray]], dict[str, np.ndarray] | int] = lambda endpoint, arrays: 500
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint = self.path.split("/")[3]
                arrays = read_arrays(self.headers[HEADER_LENGTH], self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((endpoint, arrays))
                answer = fake.behave(endpoint, arrays)
                if isinstance(answer, dict):
                    header, body = write_arrays(answer)
                    self.send_response(200)
                    self.send_header(HEADER_LENGTH, str(len(header)))
                elif answer:
                    header, body = b"", json.dumps({"error": f"Traceback\n{AnswerError('operation failed on rank 1: x')}\n at:"}).encode()
                    self.send_response(answer)
                else:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_header("Content-Length", str(len(header) + len(body)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a client that has given up
                    self.wfile.write(header + body)

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        port = self.http.server_address[1]
        registration = make_registration(name=name, incarnation="f" * 8, connect_host="127.0.0.1", port=port, num_ranks=1, checkpoint="")
        self.registration = registration
        self.publication = Publication(services_dir, registration, heartbeat_seconds=60)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.publication.withdraw()


def read_arrays(length: str, body: bytes) -> dict[str, np.ndarray]:
    header, position, arrays = json.loads(body[: int(length)]), int(length), {}
    for tensor in header["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        dtype = {"INT64": "<i8", "FP32": "<f4", "BYTES": "u1"}[tensor["datatype"]]
        array = np.frombuffer(body[position : position + size], dtype=dtype)
        arrays[tensor["name"]] = array if dtype == "u1" else array.reshape(tensor["shape"])
        position += size
    return arrays


def write_arrays(arrays: dict[str, np.ndarray]) -> tuple[bytes, bytes]:
    outputs, blobs = [], []
    for name, array in arrays.items():
        blob = b"".join(len(text).to_bytes(4, "little") + text for text in array) if array.dtype == object else array.tobytes()
        datatype = "BYTES" if array.dtype == object else "FP32"
        outputs.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": {"binary_data_size": len(blob)}})
        blobs.append(blob)
    return json.dumps({"outputs": outputs}).encode(), b"".join(blobs)


@pytest.fixture
def critic(tmp_path: Path) -> Iterator[FakeTriton]:
    server = FakeTriton(tmp_path, "critic")
    yield server
    server.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[CriticClient]:
    made = CriticClient(tmp_path, config=CONFIG)
    yield made
    made.close()


def doubled(endpoint: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"values": arrays["tokens"].astype(np.float32) * 2}


def tokens(rows: int) -> TokenBatch:
    return TokenBatch(tokens=torch.arange(rows * 2).reshape(rows, 2), lengths=torch.full((rows,), 2))


def value_batch() -> ValueBatch:
    zeros = torch.zeros(1, 2)
    return ValueBatch(
        tokens=torch.ones(1, 2, dtype=torch.int64),
        lengths=torch.tensor([2]),
        loss_mask=torch.tensor([[False, True]]),
        old_values=zeros,
        returns=zeros,
    )


def test_values_come_back_in_order_from_pieces(critic: FakeTriton, client: CriticClient) -> None:
    critic.behave = doubled
    assert torch.equal(client.values(tokens(5)).result(10), torch.arange(10.0).reshape(5, 2) * 2)
    assert sorted(arrays["tokens"].shape[0] for _, arrays in critic.requests) == [1, 2, 2]


def test_train_and_save_go_one_after_the_other(critic: FakeTriton, client: CriticClient) -> None:
    running: list[str] = []

    def behave(endpoint: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert not running
        running.append(endpoint)
        threading.Event().wait(0.02)
        running.pop()
        text = np.array([b'{"value/loss": 0.25}' if endpoint == "critic_train" else b"/checkpoints/step-2"], dtype=object)
        return {"loss_mean": np.array([0.25], np.float32), "metrics": text} if endpoint == "critic_train" else {"path": text}

    critic.behave = behave
    futures = [client.train(value_batch(), 1), client.train(value_batch(), 2), client.save(2)]
    assert [future.result(10) for future in futures] == [{"value/loss": 0.25}, {"value/loss": 0.25}, "/checkpoints/step-2"]
    assert [(endpoint, int(arrays["step"][0])) for endpoint, arrays in critic.requests] == [
        ("critic_train", 1),
        ("critic_train", 2),
        ("critic_save", 2),
    ]


def test_a_broken_connection_repeats_values_but_never_training(critic: FakeTriton, client: CriticClient) -> None:
    critic.behave = lambda endpoint, arrays: doubled(endpoint, arrays) if len(critic.requests) == 3 else 0
    assert client.values(tokens(1)).result(10).tolist() == [[0.0, 2.0]]
    assert len(critic.requests) == 3
    critic.requests.clear()
    with pytest.raises(ServerUnreachable, match=r"critic_train: critic at http://127.0.0.1:\d+ .*RemoteDisconnected"):
        client.train(value_batch(), 1).result(10)
    assert len(critic.requests) == 1


def test_repetition_ends(critic: FakeTriton, client: CriticClient) -> None:
    critic.behave = lambda endpoint, arrays: 0
    with pytest.raises(ServerUnreachable, match="never answered this client.*its registration is alive"):
        client.values(tokens(1)).result(10)
    assert len(critic.requests) == 3


def test_an_error_answer_is_not_repeated(critic: FakeTriton, client: CriticClient) -> None:
    critic.behave = lambda endpoint, arrays: 500
    with pytest.raises(RequestRejected, match=r"^operation failed on rank 1: x \(critic at http"):
        client.values(tokens(1)).result(10)
    assert len(critic.requests) == 1


def test_a_silent_server_times_out(critic: FakeTriton, tmp_path: Path) -> None:
    release = threading.Event()
    critic.behave = lambda endpoint, arrays: release.wait(20) and doubled(endpoint, arrays)
    impatient = CriticClient(tmp_path, config=replace(CONFIG, request_timeout_seconds=0.3))
    with pytest.raises(ServerTimeout, match=r"critic_infer: critic at .* did not answer within 0.3 s; it may still be working on it"):
        impatient.values(tokens(1)).result(10)
    release.set()
    impatient.close()
    assert len(critic.requests) == 1


def test_closing_ends_pending_calls(critic: FakeTriton, client: CriticClient) -> None:
    release = threading.Event()
    critic.behave = lambda endpoint, arrays: release.wait(20) and doubled(endpoint, arrays)
    pending = client.values(tokens(1))
    while not critic.requests:
        threading.Event().wait(0.01)
    client.close()
    with pytest.raises(ServerUnreachable, match="this client was closed"):
        pending.result(10)
    release.set()


def test_a_replaced_critic_is_refused(critic: FakeTriton, client: CriticClient, tmp_path: Path) -> None:
    critic.behave = doubled
    client.values(tokens(1)).result(10)
    path = registration_path(tmp_path, "critic")
    path.write_text(path.read_text().replace("f" * 8, "e" * 8))
    critic.behave = lambda endpoint, arrays: 0
    with pytest.raises(ServerUnreachable, match="it was replaced by critic at .*, whose weights may be others"):
        client.values(tokens(1)).result(10)


def test_no_server_says_where_it_looked(client: CriticClient, tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=rf"critic: waited 0 s .*{tmp_path}/critic.json; last seen: no server has registered there"):
        client.values(tokens(1)).result(10)


def test_rewards(tmp_path: Path) -> None:
    server = FakeTriton(tmp_path, "reward")
    server.behave = lambda endpoint, arrays: {"rewards": arrays["sequence_lengths"].astype(np.float32)}
    rollouts = [
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
    client = RewardClient(tmp_path, config=CONFIG)
    assert client.score(rollouts).result(10).tolist() == [2.0, 4.0, 3.0]  # prompt and response tokens
    by_rows = {arrays["tokens"].shape[0]: arrays["tokens"].tolist() for _, arrays in server.requests}
    assert by_rows == {2: [[5, 6, 0, 0], [5, 6, 6, 6]], 1: [[5, 6, 6]]}

    server.behave = lambda endpoint, arrays: {"rewards": np.repeat(arrays["sequence_lengths"], 2, axis=1).astype(np.float32)}
    with pytest.raises(RequestRejected, match="2 attributes per row"):
        client.score(rollouts).result(10)
    summing = RewardClient(tmp_path, config=CONFIG, reduce=lambda scores: scores.sum(dim=1))
    assert summing.score(rollouts).result(10).tolist() == [4.0, 8.0, 6.0]
    with pytest.raises(ValueError, match="no rollouts"):
        client.score([])
    client.close()
    summing.close()
    server.close()


def test_an_unclosed_client_does_not_keep_its_process(tmp_path: Path) -> None:
    """It waits for a server that never comes, for 1,000 s, while the main thread ends."""
    code = (
        "import sys, torch; from pathlib import Path; from aligner.servers.client import CriticClient;"
        "from aligner.servers.config import ClientConfig; from aligner.types import TokenBatch;"
        "c = CriticClient(Path(sys.argv[1]), config=ClientConfig(discovery_timeout_seconds=1000));"
        "c.values(TokenBatch(tokens=torch.ones(1, 1, dtype=torch.int64), lengths=torch.ones(1, dtype=torch.int64)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False).returncode == 0


def test_clients_import_no_server_library() -> None:
    code = (
        "import sys, aligner.servers.client, aligner.servers.server;"
        "print([m for m in ('pytriton', 'tritonclient', 'gevent', 'grpc', 'megatron') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
    lane, seen = Lane("test", 1), []
    first = lane.submit(lambda: seen.append(1))
    broken = lane.submit(lambda: 1 // 0)
    last = lane.submit(lambda: seen.append(2))
    last.result(10)
    assert first.done() and seen == [1, 2]
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    lane.close(10)
