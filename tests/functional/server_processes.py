"""Starts toy_server.py in processes of its own and tells what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import ForkedProcess, preloaded

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ToyServer:
    """The ranks of one toy server; `log(rank)` is what a rank printed."""

    def __init__(
        self,
        kind: str,
        services_dir: Path,
        *,
        num_ranks: int = 1,
        transport: str = "auto",
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.services_dir = services_dir
        self._environment = environment or {}
        services_dir.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = str(free_port())
        self._logs = [services_dir.parent / f"{kind}.{rendezvous}.{rank}.log" for rank in range(num_ranks)]
        self.ranks = [
            self._start(
                (kind, str(services_dir), "--port", str(port), "--transport", transport),
                rank,
                {} if num_ranks == 1 else _rank_variables(rank, num_ranks, rendezvous),
            )
            for rank in range(num_ranks)
        ]

    def _start(self, arguments: Sequence[str], rank: int, variables: dict[str, str]) -> ForkedProcess:
        command = [str(Path(__file__).parent / "toy_server.py"), *arguments]
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._environment}
        return preloaded().start(command, environment, self._logs[rank], Path.cwd())

    def log(self, rank: int = 0) -> str:
        return self._logs[rank].read_text()

    def exit_codes(self, timeout_seconds: float = 40.0) -> list[int]:
        """Every rank's exit code, once all have ended."""
        return [rank.wait(timeout=timeout_seconds) for rank in self.ranks]

    def end(self) -> None:
        """Ask the ranks that still run to stop; kill those that do not within 20 s."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)
        for rank in self.ranks:
            try:
                rank.wait(timeout=20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


def _rank_variables(rank: int, num_ranks: int, rendezvous: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": rendezvous}


TRANSPORTS = (pytest.param("pytriton", marks=pytest.mark.pytriton), "http")


@contextmanager
def toy_server(kind: str, services_dir: Path, **options: object) -> Iterator[ToyServer]:
    """A toy server that is gone when the block ends."""
    server = ToyServer(kind, services_dir, **options)
    try:
        yield server
    finally:
        server.end()
