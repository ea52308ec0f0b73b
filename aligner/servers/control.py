"""How rank 0 leads the other ranks of a server: commands go out, reports come back, and a failure on one rank reaches all of them.

Every rank constructs these objects at the same point. All traffic is on CPU tensors in a separate gloo group, so that it neither mixes
with the model's collectives nor needs a GPU. A server of one process needs no process group at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # no public way to the store that every process group already has

from aligner.parallel.collectives import broadcast_object, gather_objects
from aligner.servers.wire import Payload

FAILURE_KEY = "aligner/servers/failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The next command for all ranks: run `operation` on `payload`; nothing if it is None (the idle no-op).

    They end after this if `stop`, and with an exception if rank 0 gives a `failure`.
    """

    operation: str | None = None
    payload: Payload | None = None
    stop: bool = False
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's report after a command: its error, and whether a signal asked it to stop."""

    error: str | None = None
    stop_requested: bool = False


class ControlGroup:
    """Broadcast of commands and gathering of reports. Collective, except for the two methods on failures."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self._store = _get_default_store().clone()  # a connection of its own: the first may be held by a rank that waits in it

    def broadcast(self, command: Command | None) -> Command:
        """Rank 0's command, on every rank."""
        return command if self._group is None else broadcast_object(command, src=0, group=self._group)

    def gather(self, report: Report) -> list[Report]:
        """Every rank's report in rank order, on every rank."""
        return [report] if self._group is None else gather_objects(report, group=self._group)

    def announce_failure(self, message: str) -> None:
        """Let ranks that are stuck in a collective of the failed operation know (the first announcement stands)."""
        if self._store is not None and not self._store.check([FAILURE_KEY]):
            self._store.set(FAILURE_KEY, message)

    def announced_failure(self) -> str | None:
        """A failure that some rank announced, or None. Called from a thread."""
        if self._store is None or not self._store.check([FAILURE_KEY]):
            return None
        return self._store.get(FAILURE_KEY).decode()

    def close(self) -> None:
        """Free the group's threads. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
