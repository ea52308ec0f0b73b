"""Functions of test modules, called by ranks in processes of their own: the other side of the fixture `on_ranks`.

    def work(parallel: dict) -> Tensor:       # of a file that every rank imports
        with world(parallel) as topology:
            ...

    def test_work(on_ranks):
        first, second = on_ranks(work, 2, {"tp": 2})

Arguments and results are pickled by torch.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from aligner.parallel.topology import Topology

TESTS = Path(__file__).resolve().parent
FOLDERS = [str(TESTS / name) for name in ("", "functional", "distributed", "fakes")]  # what tests share


def free_port() -> int:
    """A port that was free a moment ago (for programs that cannot be given port 0)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def joined(timeout_seconds: float = 120) -> Iterator[None]:
    """This rank's world, without a layout. An error leaves it as it is: the process ends."""
    from aligner.parallel import launch

    launch.initialize("gloo", timeout_seconds=120, fingerprint="tests", collective_timeout_seconds=timeout_seconds)
    yield
    launch.shutdown()


@contextmanager
def laid_out(parallel: dict[str, Any] | None = None, *, seed: int = 11) -> Iterator[Topology]:
    """The world's ranks in a layout (fields of ParallelConfig); another one may follow."""
    from aligner.parallel.mcore import parallel_state
    from aligner.parallel.topology import ParallelConfig, initialize

    yield initialize(ParallelConfig(**(parallel or {})), seed=seed)
    parallel_state.destroy_model_parallel()


@contextmanager
def world(parallel: dict[str, Any] | None = None, *, seed: int = 11, timeout_seconds: float = 120) -> Iterator[Topology]:
    with joined(timeout_seconds), laid_out(parallel, seed=seed) as topology:
        yield topology


def local_variables(num_ranks: int, port: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank on this machine, where a store listens on the port."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def ask(folder: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    torch.save((function.__code__.co_filename, function.__name__, arguments), folder / "call.pt")


def answers(folder: Path, num_ranks: int) -> list[Any]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def main(folder: Path) -> None:
    sys.path[:0] = FOLDERS
    rank = os.environ.get("RANK") or os.environ.get("PMI_RANK", "0")  # one process may have neither
    file, name, arguments = torch.load(folder / "call.pt", weights_only=False)
    sys.path.insert(0, str(Path(file).parent))
    result = getattr(importlib.import_module(Path(file).stem), name)(*arguments)
    torch.save(result, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
