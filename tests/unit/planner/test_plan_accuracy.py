"""The plan's error against step times that others have published: it must not grow (benchmarks/published_steps.yaml)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import plan_accuracy
from plan_accuracy import Row, error, rows


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By job; in a process of its own, since a plan has a torch.distributed world."""
    path = tmp_path_factory.mktemp("plan") / "errors.json"
    done = subprocess.run(
        [sys.executable, plan_accuracy.__file__, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["planned"] for one in json.loads(path.read_text())}


def test_an_error_is_a_factor_in_either_direction():
    assert error(50.0, 100.0) == pytest.approx(1.0) and error(200.0, 100.0) == pytest.approx(1.0) and error(100.0, 100.0) == 0


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_error_does_not_grow(row: Row, planned: dict[str, float]):
    """Where it shrinks, the new figure goes into the file and into docs/planning.md."""
    assert error(planned[row.name], row.published) <= error(row.recorded, row.published) + 0.01
    assert planned[row.name] == pytest.approx(row.recorded, rel=0.01)
