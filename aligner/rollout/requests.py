"""Spans of a replica's requests, from when its engine takes one until the response has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aligner import recording
from aligner.protocols import Replica
from aligner.rollout.engine import GenRequest, GenResult, Work


class RecordedWork:
    """`Work` that another one gives; the replica's leading rank records it. A turn of an episode is a request of its own."""

    def __init__(self, work: Work, replica: Replica) -> None:
        self._work = work
        self._lane = f"replica {replica.index}"
        self._taken: dict[int, tuple[float, int]] = {}  # since when, and the tokens of the prompt
        self._records = replica.is_leader and recording.is_on()

    @property
    def is_open(self) -> bool:
        return self._work.is_open

    def take(self, room: int) -> Sequence[GenRequest]:
        requests = self._work.take(room)
        if self._records and requests:
            now = time.perf_counter()
            self._taken |= {request.index: (now, len(request.tokens)) for request in requests}
        return requests

    def ended(self, results: Sequence[GenResult]) -> None:
        """The engine has given these."""
        for result in results:
            if result.index not in self._taken:
                continue
            start, prompt = self._taken.pop(result.index)
            recording.add("response", start, self._lane, prompt=prompt, tokens=len(result.tokens), ended_by=result.finish_reason.value)
