"""Which rows each rank computes. (What needs two ranks is in tests/distributed/test_engine_layouts.py.)"""

from __future__ import annotations

import pytest
import torch

from aligner.parallel import collectives
from aligner.parallel.micro_batches import shard_bounds
from aligner.telemetry.metrics import Max, Mean, Sum


def test_shard_bounds_by_hand():
    assert [shard_bounds(7, shard=i, num_shards=3) for i in range(3)] == [(0, 2), (2, 4), (4, 7)]
    assert [shard_bounds(8, shard=i, num_shards=4) for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [shard_bounds(1, shard=i, num_shards=2) for i in range(2)] == [(0, 0), (0, 1)]
    assert [shard_bounds(0, shard=i, num_shards=2) for i in range(2)] == [(0, 0), (0, 0)]


def test_shard_bounds_keep_pairs_together():
    assert [shard_bounds(10, shard=i, num_shards=2, unit=2) for i in range(2)] == [(0, 4), (4, 10)]
    assert [shard_bounds(2, shard=i, num_shards=3, unit=2) for i in range(3)] == [(0, 0), (0, 0), (0, 2)]


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_shards_cover_every_row_once_and_are_near_equal(num_shards, unit):
    for units in range(20):
        bounds = [shard_bounds(units * unit, shard=i, num_shards=num_shards, unit=unit) for i in range(num_shards)]
        assert bounds[0][0] == 0 and bounds[-1][1] == units * unit
        assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False))
        sizes = [stop - start for start, stop in bounds]
        assert max(sizes) - min(sizes) <= unit and all(size % unit == 0 for size in sizes)


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
