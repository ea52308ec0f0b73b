"""What is behind the gateway, without Triton: a real Intake, a thread that answers its tickets, and for `pytriton` a Unix socket whose
requests go to the Intake. There errors come back the way Triton gives them: status 500 with our text somewhere inside a traceback.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import torch

from aligner.servers import wire
from aligner.servers.access import Access
from aligner.servers.config import RequestLimits, ServerConfig
from aligner.servers.gateway import Gateway
from aligner.servers.health import Health
from aligner.servers.intake import Intake, Operation, Straight, ThroughTriton
from aligner.servers.kserve import HEADER_LENGTH, encode_response, read_request

LIMITS = RequestLimits(vocab_size=100, max_sequence_length=8, max_rows=16, max_text_bytes=200)
ENDPOINTS = (wire.CRITIC_INFER, wire.CRITIC_TRAIN, wire.CRITIC_SAVE, wire.REWARD_MODEL)


def nothing(payload: object) -> None:
    """Handlers run in a server's loop, which is not here."""


@contextmanager
def served(
    folder: Path, access: Access, *, transport: str = "pytriton", config: ServerConfig | None = None
) -> Iterator[tuple[Gateway, FakeTriton, Health]]:
    """A gateway before such a Triton, and the health that it reports."""
    config = config or ServerConfig()
    health = Health("critic", "1234", "77.0", 2, config=config)
    gateway = Gateway(config, access, ENDPOINTS, LIMITS, health)
    fake = FakeTriton(folder / "http", transport)
    gateway.start()
    gateway.connect(fake.upstream)
    try:
        yield gateway, fake, health
    finally:
        gateway.stop()
        fake.close()


class _Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class FakeTriton:
    """`received`: (endpoint, arrays) of every request that the gateway let through; nothing is answered while `may_answer` is not set.

    `upstream` is the way to it. `interrupt` replaces the answer to the next ones that come over the socket.
    """

    def __init__(self, path: Path, transport: str = "pytriton") -> None:
        self.upstream = ThroughTriton(path) if transport == "pytriton" else Straight(self._submit)
        self.intake = Intake({endpoint.name: Operation(endpoint=endpoint, handler=nothing) for endpoint in ENDPOINTS}, LIMITS)
        self.received: list[tuple[str, dict[str, np.ndarray]]] = []
        self.answered: list[str] = []
        self.interrupt: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._ended = threading.Event()
        self._http = _Listener(str(path), self._handler())
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True),
            threading.Thread(target=self._answer, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    def _submit(self, endpoint: wire.Endpoint, arrays: dict[str, np.ndarray]) -> Future:
        self.received.append((endpoint.name, arrays))
        return self.intake.submit(endpoint, arrays)

    def _answer(self) -> None:
        """Values are the tokens doubled; rewards the lengths of the responses in bytes."""
        while not self._ended.is_set():
            ticket = self.intake.take(0.02)
            if ticket is None:
                continue
            self.may_answer.wait(20)
            endpoint, payload = ticket.operation.endpoint, ticket.payload
            self.answered.append(endpoint.name)
            if endpoint is wire.CRITIC_INFER:
                answer = endpoint.encode(payload, payload.batch.tokens * 2.0)
            elif endpoint is wire.REWARD_MODEL:
                answer = endpoint.encode(payload, torch.tensor([[float(len(text.encode()))] for text in payload.texts.responses]))
            else:
                answer = endpoint.encode(payload, "/x") if endpoint is wire.CRITIC_SAVE else {}
            self.intake.answer(ticket, answer)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint = next(endpoint for endpoint in ENDPOINTS if self.path == f"/v2/models/{endpoint.name}/infer")
                request = read_request(endpoint, LIMITS, self.headers[HEADER_LENGTH], body)
                if fake.interrupt(self):
                    return
                try:
                    answer = fake._submit(endpoint, request.arrays()).result(30)
                    status, (headers, content) = 200, encode_response(answer, request.outputs)
                except Exception as error:
                    text = f"Traceback (most recent call last):\n  File x\nAnswerError: {error}\n\nAt:\n  model.py(1): execute"
                    status, headers, content = 500, {}, json.dumps({"error": text}).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler
