"""The plan's error against step times that others have published: it must not grow (benchmarks/published_steps.yaml)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from plan_accuracy import Row, error, rows


def test_an_error_is_a_factor_in_either_direction():
    assert error(50.0, 100.0) == pytest.approx(1.0) and error(200.0, 100.0) == pytest.approx(1.0) and error(100.0, 100.0) == 0


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_error_does_not_grow(row: Row):
    """Where it shrinks, the new figure goes into the file and into docs/planning.md."""
    planned, _ = row.planned()
    assert error(planned, row.published) <= error(row.recorded, row.published) + 0.01
    assert planned == pytest.approx(row.recorded, rel=0.01)
