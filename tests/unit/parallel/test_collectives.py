"""Which rows each rank computes. (What needs two ranks is in tests/distributed/test_engine_layouts.py.)"""

from __future__ import annotations

import pytest
import torch

from aligner.parallel import collectives
from aligner.parallel.micro_batches import shard_bounds
from aligner.telemetry.metrics import Max, Mean, Sum


def test_shard_bounds_by_hand():
    assert shard_bounds(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert shard_bounds(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert shard_bounds(1, 2) == [(0, 0), (0, 1)]
    assert shard_bounds(0, 2) == [(0, 0), (0, 0)]


def test_world_of_one(topology):
    rows = torch.arange(6).reshape(3, 2)
    assert torch.equal(collectives.gather_assigned_rows(rows[[2, 0, 1]], [[2, 0, 1]], group=topology.dp_group), rows)
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]
    assert collectives.broadcast_object("x") == "x"
    collectives.raise_everywhere(None)
    error = ValueError("this one")
    with pytest.raises(ValueError, match="this one") as caught:
        collectives.raise_everywhere(error)
    assert caught.value is error


def test_reduce_metrics_of_one_rank_keeps_kinds_and_numbers(topology):
    metrics = {"a/mean": Mean(total=torch.tensor(3.0), count=torch.tensor(4)), "a/max": Max(maximum=-2.5), "a/sum": Sum(total=7)}
    reduced = collectives.reduce_metrics(metrics, topology.dp_group, torch.device("cpu"))
    assert reduced == {"a/mean": Mean(total=3.0, count=4.0), "a/max": Max(maximum=-2.5), "a/sum": Sum(total=7.0)}
    assert list(reduced) == list(metrics)
    assert collectives.reduce_metrics({}, topology.dp_group, torch.device("cpu")) == {}
