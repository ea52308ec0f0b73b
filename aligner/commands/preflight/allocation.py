"""The ranks of an allocation and their messages (small JSON in the rendezvous store, with deadlines): a missing rank is named."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import DistError, Store

from aligner.errors import LaunchError
from aligner.parallel.agreement import rank_list
from aligner.parallel.launch import World, expand_hostlist, meet

_SHORTEST_PAUSE = 0.002  # seconds between two looks into the store, at first
_MARGIN_SECONDS = 1.0  # the others wait so much longer than rank 0, whose message says who is missing
_LINGER_SECONDS = 5.0  # rank 0, whose end is the store's end, lets the others read the last verdict


class Abandoned(Exception):
    """Another rank has failed in this item: the awaited value will not come."""


class Allocation:
    """This rank among the others. `deadline` (time.monotonic) belongs to the current item `item`."""

    def __init__(self, world: World, store: Store, node: str) -> None:
        self.world, self.rank, self.size = world, world.rank, world.world_size
        self.store = store
        self.node = node
        self.nodes: tuple[str, ...] = (node,) if world.world_size == 1 else ()  # of every rank, once they have met
        self.item = ""
        self.deadline = time.monotonic()

    def begin(self, item: str, timeout_seconds: float) -> None:
        """Later waits belong to this item."""
        self.item, self.deadline = item, time.monotonic() + timeout_seconds

    def node_of(self, rank: int) -> str:
        """The node of a rank, `?` if the ranks have not met."""
        return self.nodes[rank] if rank < len(self.nodes) else "?"

    def leaders(self) -> list[int]:
        """The first rank of every node, by rank."""
        first: dict[str, int] = {}
        for rank, node in enumerate(self.nodes):
            first.setdefault(node, rank)
        return sorted(first.values())

    def put(self, key: str, value: Any) -> None:
        """Leave a JSON value for the other ranks."""
        with self._connection():
            self.store.set(f"preflight/{self.item}/{key}", json.dumps(value))

    def has(self, key: str) -> bool:
        with self._connection():
            return self.store.check([f"preflight/{self.item}/{key}"])

    def _read(self, key: str) -> Any:
        with self._connection():
            return json.loads(self.store.get(f"preflight/{self.item}/{key}"))

    @contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise LaunchError(f"rank {self.rank} on {self.node} lost rank 0 in {self.item}: {error}") from error

    def get(self, key: str, *, deadline: float, what: str, heeds_failure: bool = True, longest_pause: float = 0.2) -> Any:
        """Wait for a value. Raises LaunchError naming `what` was awaited, Abandoned if another rank failed meanwhile."""
        started, pause = time.monotonic(), _SHORTEST_PAUSE
        # The store's own `wait` fills stderr with warnings where it has to be repeated, and keeps every other call of this process out.
        while not self.has(key):
            if heeds_failure and self.has("failed") and not self.has(key):
                raise Abandoned
            if time.monotonic() >= deadline:
                waited = time.monotonic() - started
                raise LaunchError(f"rank {self.rank} on {self.node} waited {waited:.0f} s for {what}")
            time.sleep(pause)
            pause = min(longest_pause, 1.5 * pause)
        return self._read(key)

    def exchange(self, key: str, value: Any, *, what: str) -> list[Any]:
        """Every rank's value, by rank, on every rank. Every rank calls it. Raises LaunchError naming the ranks that did not come."""
        self.put(f"{key}/{self.rank}", value)
        if self.rank == 0:
            self.put(key, self._collect(key, what))
        return self.get(key, deadline=self.deadline + _MARGIN_SECONDS, what=f"rank 0 to hear {what} of all ranks")

    def _collect(self, key: str, what: str) -> list[Any]:
        try:
            return [self.get(f"{key}/{rank}", deadline=self.deadline, what=f"{what} of rank {rank}") for rank in range(self.size)]
        except LaunchError as error:
            missing = [rank for rank in range(self.size) if not self.has(f"{key}/{rank}")]
            text = f"rank 0 waited for {what}: {rank_list(missing)} of {self.size} did not come{self._where(key, missing)}"
            raise LaunchError(text) from error

    def _where(self, key: str, missing: list[int]) -> str:
        """The nodes of the missing ranks, for the message."""
        if self.nodes:
            return f" (on {', '.join(dict.fromkeys(self.nodes[rank] for rank in missing))})"
        if "SLURM_STEP_NODELIST" not in os.environ:
            return ""
        came = [rank for rank in range(self.size) if rank not in missing]
        heard = {str(self.get(f"{key}/{rank}", deadline=self.deadline + _MARGIN_SECONDS, what="a node")["node"]) for rank in came}
        silent = [node for node in expand_hostlist(os.environ["SLURM_STEP_NODELIST"]) if node not in heard]
        return f" (nobody came from {', '.join(silent)})" if silent else ""

    def answers(self, ranks: list[int], *, deadline: float, grace_seconds: float) -> dict[int, Any]:
        """On rank 0: the answers of `ranks` that come in time. After a failure of one, the others have `grace_seconds` left."""
        found: dict[int, Any] = {}
        has_failed, pause = False, _SHORTEST_PAUSE
        while True:
            for rank in ranks:
                if rank not in found and self.has(f"answer/{rank}"):
                    found[rank] = self._read(f"answer/{rank}")
            if not has_failed and self.has("failed"):
                has_failed, deadline = True, min(deadline, time.monotonic() + grace_seconds)
            if len(found) == len(ranks) or time.monotonic() >= deadline:
                return found
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)

    def leave(self, present: list[int]) -> None:
        """Rank 0 waits briefly until the `present` ranks have read all values; the others confirm that they have."""
        self.item = "end"
        with suppress(LaunchError):  # rank 0 has already timed out and reported, or a rank died meanwhile: the verdict stands
            if self.rank != 0:
                self.put(f"read/{self.rank}", True)
                return
            deadline = time.monotonic() + _LINGER_SECONDS
            for rank in filter(None, present):
                self.get(f"read/{rank}", deadline=deadline, what=f"rank {rank} to read the last verdict")


def join(timeout_seconds: float, environ: Mapping[str, str], connect: Callable[..., tuple[World, Store]] = meet) -> Allocation:
    """Meet at the store. Raises LaunchError if it is unreachable: rank 0 did not come."""
    world, store = connect(timeout_seconds=timeout_seconds, environ=environ)
    return Allocation(world, store, environ.get("SLURMD_NODENAME") or socket.gethostname())
