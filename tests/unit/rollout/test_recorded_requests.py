"""A replica's requests as spans: from when its engine takes one until the response has ended, on the leading rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.protocols import Replica
from aligner.rollout.engine import GenRequest, GenResult, ListedWork
from aligner.rollout.engine.lifecycle import RecordedWork
from aligner.telemetry import recording
from aligner.telemetry.recording import read_spans
from aligner.types import FinishReason, LogprobKind


def request(index: int, length: int) -> GenRequest:
    return GenRequest(index=index, tokens=(1,) * length, seed=index)


def result(index: int, length: int) -> GenResult:
    return GenResult(
        index=index,
        tokens=(2,) * length,
        logprobs=(0.0,) * length,
        kind=LogprobKind.sampled,
        finish_reason=FinishReason.stop,
        weight_version=1,
    )


@pytest.mark.parametrize("is_leader", [True, False])
def test_requests_and_turns(is_leader: bool, tmp_path: Path):
    recording.record_in(tmp_path / "actor.0.jsonl", rank=0, most_bytes=1 << 20)
    work = RecordedWork(ListedWork([request(0, 3), request(1, 4)]), Replica(index=2, count=4, is_leader=is_leader))
    assert [one.index for one in work.take(1)] == [0] and not work.is_open
    assert [one.index for one in work.take(5)] == [1] and not work.take(5)
    work.ended([result(1, 6)])
    work.ended([result(0, 5), result(7, 1)])  # of 7 nothing is known: no reason to fail
    recording.close()
    spans = read_spans(tmp_path)[0]
    found = [(span.name, span.lane, dict(span.arguments)) for span in spans]
    expected = [({"prompt": 3, "tokens": 5}), ({"prompt": 4, "tokens": 6})]
    assert found == [("response", "replica 2", one | {"ended_by": "stop"}) for one in expected] * is_leader


def test_without_a_recording_nothing_is_kept():
    work = RecordedWork(ListedWork([request(0, 3)]), Replica())
    work.take(1)
    assert work._taken == {}
