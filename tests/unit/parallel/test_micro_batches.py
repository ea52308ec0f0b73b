"""Which rows go where: every row once, units together, budgets kept, replicas even."""

from __future__ import annotations

import random

import pytest

from aligner.parallel.micro_batches import MicroBatching, plan


def test_by_rows_shares_are_contiguous():
    assert plan([1] * 5, MicroBatching(rows=2), num_replicas=1) == [[[0, 1], [2, 3], [4]]]
    assert plan([1] * 5, MicroBatching(rows=2), num_replicas=2) == [[[0, 1]], [[2, 3], [4]]]
    assert plan([1] * 4, MicroBatching(rows=1), num_replicas=2, unit=2) == [[[0, 1]], [[2, 3]]]
    assert plan([1], MicroBatching(rows=2), num_replicas=2) == [[], [[0]]]


def test_packed_bins_by_hand():
    """Largest first: 6 opens a bin of 8, 5 a second, 3 fits into the second, 2 into the first, 1 needs a third."""
    assert plan([2, 5, 6, 1, 3], MicroBatching(tokens=8, packed=True), num_replicas=1) == [[[0, 2], [1, 4], [3]]]
    # In fours each counts 4, 8, 8, 4, 4.
    assert plan([2, 5, 6, 1, 3], MicroBatching(tokens=8, packed=True), num_replicas=1, multiple=4) == [[[0, 3], [1], [2], [4]]]


def test_padded_bins_share_their_longest_length():
    """6 and 5 cost 12 of 13 together; 3 and 2 and 1 cost 9."""
    assert plan([2, 5, 6, 1, 3], MicroBatching(tokens=13), num_replicas=1) == [[[0, 3, 4], [1, 2]]]


def test_a_row_larger_than_the_budget_goes_alone():
    assert plan([20, 3, 4], MicroBatching(tokens=8, packed=True), num_replicas=1) == [[[0], [1, 2]]]
    assert plan([20, 3, 4], MicroBatching(tokens=8), num_replicas=1) == [[[0], [1, 2]]]


def test_replicas_get_about_as_many_tokens():
    """9 to the first, 7 to the second, 6 to the second (7 < 9), 5 to the first (9 < 13): 14 and 13."""
    assert plan([5, 9, 6, 7], MicroBatching(tokens=100, packed=True), num_replicas=2) == [[[0, 1]], [[2, 3]]]


def test_pairs_stay_together():
    got = plan([9, 1, 2, 2, 3, 3], MicroBatching(tokens=10, packed=True), num_replicas=2, unit=2)
    assert got == [[[0, 1]], [[2, 3, 4, 5]]]
    with pytest.raises(ValueError, match="3 rows do not come in units of 2"):
        plan([1, 2, 3], MicroBatching(), num_replicas=1, unit=2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("unit", [1, 2])
def test_every_row_once_and_no_budget_exceeded(packed, unit):
    draw = random.Random(3)
    for _ in range(50):
        lengths = [draw.randint(1, 40) for _ in range(unit * draw.randint(1, 30))]
        budget, replicas, multiple = draw.randint(20, 100), draw.randint(1, 4), draw.choice([1, 4])
        got = plan(lengths, MicroBatching(tokens=budget, packed=packed), num_replicas=replicas, unit=unit, multiple=multiple)
        assert sorted(row for replica in got for part in replica for row in part) == list(range(len(lengths)))
        rounded = [-(-length // multiple) * multiple for length in lengths]
        for part in (part for replica in got for part in replica):
            assert all(part[i + 1] == part[i] + 1 and part[i] % 2 == 0 for i in range(0, len(part), 2)) if unit == 2 else True
            size = sum(rounded[row] for row in part) if packed else len(part) * max(rounded[row] for row in part)
            assert size <= budget or len(part) == unit
        if len(lengths) // unit >= replicas:
            assert all(got)  # no replica idles
