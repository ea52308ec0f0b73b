"""Shares the requests of one generation over an engine's replicas while it runs, so that all of them end at about the same time.

The length of a response is unknown until it ends, so replicas with equally many requests would end far apart. Each replica therefore starts
with a small share and takes more from one queue as it has room. All replicas hold the whole list, in the same order. The queue is a number
in the rendezvous store of the process groups (the same for gloo and NCCL); the leading rank of a replica adds to it, and the others follow.
A sample depends on its prompt and seed alone, so any replica may compute it.

- Longest prompts first, ties in the given order: their cost is known and the largest, so little work remains when replicas run out one
  after the other. (List scheduling in order of decreasing cost ends within 4/3 of the optimum, in any order within 2: Graham, "Bounds on
  multiprocessing timing anomalies", 1969.)
- Half of the work, at least one group each, is dealt out first, as in the first round of guided self-scheduling (a replica takes
  1 / (2 * replicas) of the rest: Polychronopoulos and Kuck, 1987). So the first replica to arrive does not take the others' start.
- The responses to one prompt are a group for one replica, which computes the prompt once. When the queue has no more than a group for each
  replica, a replica without room for a whole group takes as much as it has room for, at least a quarter (each part computes the prompt
  again), and others take the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # no public way to the store that every process group already has

from aligner.errors import EngineError
from aligner.parallel import platform
from aligner.parallel.collectives import leaders_integers
from aligner.parallel.micro_batches import shard_bounds
from aligner.protocols import Replica
from aligner.rollout.engine import GenRequest, ListedWork, Work

STORE_SECONDS = 120.0  # for an answer of the store, which takes microseconds if rank 0 lives
MOST_PARTS = 4  # into which a group at the end of the queue is cut
KEY = "aligner/rollout/work"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The `opening` requests of each replica, and the `queue` that all take from as they have room.

    `ends[i]` is the end of group i in `queue`, `group_of[j]` the group of request j in it.
    """

    opening: tuple[tuple[GenRequest, ...], ...]
    queue: tuple[GenRequest, ...]
    ends: tuple[int, ...]
    group_of: tuple[int, ...]

    def claim(self, start: int, room: int) -> int:
        """The number of requests that a replica with `room` takes from the queue, of which `start` are gone; 0 if none are left."""
        if start >= len(self.queue):
            return 0
        first, replicas = self.group_of[start], len(self.opening)
        stop, left = self.ends[first], len(self.ends) - first
        if stop - start > room:
            whole = stop - (self.ends[first - 1] if first else 0)
            return stop - start if left > replicas else min(stop - start, max(room, -(-whole // MOST_PARTS)))
        for end in self.ends[first + 1 : first + left // (2 * replicas)]:
            if end - start <= room:
                stop = end
        return stop - start


def divide(requests: Sequence[GenRequest], num_replicas: int, *, fixed: bool = False) -> Division:
    """A pure function, so every rank gets the same result. `fixed` deals everything out and leaves an empty queue."""
    groups = _groups(requests, num_replicas)
    each = max(1, len(groups) // (2 * num_replicas)) if not fixed else -(-len(groups) // num_replicas)
    dealt, shared = groups[: each * num_replicas], groups[each * num_replicas :]
    ends, group_of = [], []
    for number, group in enumerate(shared):
        group_of += [number] * len(group)
        ends.append(len(group_of))
    return Division(
        opening=tuple(tuple(request for group in dealt[index::num_replicas] for request in group) for index in range(num_replicas)),
        queue=tuple(request for group in shared for request in group),
        ends=tuple(ends),
        group_of=tuple(group_of),
    )


def _groups(requests: Sequence[GenRequest], num_replicas: int) -> list[list[GenRequest]]:
    """Neighbours with the same prompt, longest prompts first; cut evenly if there would be fewer groups than replicas."""
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.tokens)]
    groups.sort(key=lambda group: -len(group[0].tokens))
    if len(groups) >= num_replicas:
        return groups
    largest = -(-len(requests) // (2 * num_replicas))
    cut = []
    for group in groups:
        parts = -(-len(group) // largest)
        bounds = shard_bounds(len(group), parts)
        cut += [group[start:stop] for start, stop in bounds]
    return cut


class SharedWork:
    """One replica's part of a generation: `aligner.rollout.engine.Work`. Fewer requests than fit do not mean the end."""

    is_open = False

    def __init__(self, division: Division, replica: Replica, queue: Queue, group: dist.ProcessGroup | None) -> None:
        self._division = division
        self._replica = replica
        self._queue = queue
        self._group = group  # the ranks of the replica; None for a single rank
        self._held = list(division.opening[replica.index])  # requests of the replica that it had no room for yet
        self._is_over = not division.queue

    def take(self, room: int) -> Sequence[GenRequest]:
        """Up to `room` more requests; none if nothing is left. Collective over the replica, with the same `room` on all of its ranks."""
        if room < 1:
            raise ValueError(f"take(room={room}): needs room for at least 1 request")
        if not self._held and not self._is_over:
            start, stop = self._agree(room)
            self._held = list(self._division.queue[start:stop])
            self._is_over = not self._held
        taken, self._held = self._held[:room], self._held[room:]
        return taken

    def abandon(self) -> None:
        """This replica has failed: the others finish their requests and start no more. Its own part stays undone."""
        self._held = []
        if not self._is_over and self._replica.is_leader:
            self._queue.add(len(self._division.queue))
        self._is_over = True

    def _agree(self, room: int) -> tuple[int, int]:
        """The leader's next part of the queue, on every rank of the replica; empty at its end."""
        error: EngineError | None = None
        start, stop = -1, -1
        if self._replica.is_leader:
            try:
                start, stop = self._claim(room)
            except EngineError as failed:  # raised once the other ranks of this replica know
                error = failed
        if self._group is not None:
            start, stop = leaders_integers((start, stop), group=self._group, device=platform.device())
        if error is not None:
            raise error
        if start < 0:
            raise EngineError(f"the leading rank of replica {self._replica.index} could not take requests; see its own message")
        return start, stop

    def _claim(self, room: int) -> tuple[int, int]:
        # Others may take between the two calls: then this is a later part, of the size that was right before.
        count = self._division.claim(self._queue.add(0), room)
        stop = self._queue.add(count) if count else len(self._division.queue)
        return stop - count, stop


class Queue:
    """The number of requests of one generation that are gone: the leaders of all replicas add to it in the store. Not collective."""

    def __init__(self, store: dist.Store, name: str, num_replicas: int, timeout_seconds: float = STORE_SECONDS) -> None:
        self._store = store
        self._taken, self._left = f"{KEY}/{name}/taken", f"{KEY}/{name}/left"
        self._num_replicas = num_replicas
        self._timeout_seconds = timeout_seconds

    def add(self, count: int) -> int:
        """Add to the number of taken requests; returns the new number. Raises EngineError if the store does not answer."""
        return self._answer(self._taken, lambda: self._store.add(self._taken, count))

    def leave(self) -> None:
        """This replica is done. The last one to leave removes the keys."""
        if self._answer(self._left, lambda: self._store.add(self._left, 1)) == self._num_replicas:
            for key in (self._taken, self._left):
                self._answer(key, lambda key=key: self._store.delete_key(key))

    def _answer(self, key: str, ask: Callable[[], T]) -> T:
        """The store's answer. In a thread, since a call has no time limit if the other side hangs."""
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="rollout-work", daemon=True)
        thread.start()
        thread.join(self._timeout_seconds)
        if answers:
            return answers[0]
        why = f"({errors[0]})" if errors else f"within {self._timeout_seconds:g} s"
        raise EngineError(
            f"the rollout engine's replicas share their requests through {key} in the rendezvous store of rank 0: it did not answer {why}"
        ) from (errors[0] if errors else None)


class WorkSharing:
    """Opens the work of one generation after the other. Every rank constructs it, and opens, at the same points.

    `group`: the ranks of this replica, its leader first; None for a single rank. `fixed` gives each replica a share that depends on the
    requests alone: then samples are computed in the same batches in every run, with the same last bits of log-probs. `store` is for tests;
    the default is the process group's.
    """

    def __init__(self, replica: Replica, group: dist.ProcessGroup | None, *, fixed: bool = False, store: dist.Store | None = None) -> None:
        self._replica, self._group, self._fixed, self._store = replica, group, fixed, store
        self._num_opened = 0

    @contextmanager
    def open(self, requests: Sequence[GenRequest]) -> Iterator[Work]:
        """This replica's share of `requests`, which all ranks pass. If the block raises, no replica starts anything more."""
        self._num_opened += 1
        division = divide(requests, self._replica.count, fixed=self._fixed)
        if not division.queue or self._replica.count == 1:
            yield ListedWork(division.opening[self._replica.index] + division.queue)
            return
        if self._store is None:
            self._store = _get_default_store().clone()  # a connection of its own: a wait may occupy the first one
        queue = Queue(self._store, str(self._num_opened), self._replica.count)
        work = SharedWork(division, self._replica, queue, self._group)
        try:
            yield work
        except BaseException:
            work.abandon()
            raise
        finally:
            if self._replica.is_leader:
                queue.leave()
