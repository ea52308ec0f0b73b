"""The plan's error against step times that others have published: it must not grow (benchmarks/published_steps.yaml)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.planner.calibration import error, median_and_worst

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WRITTEN = yaml.safe_load((BENCHMARKS / "published_steps.yaml").read_text())


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All jobs; in a process of its own, since a plan has a torch.distributed world."""
    path = tmp_path_factory.mktemp("plan") / "errors.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "plan_accuracy.py"), "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_an_error_is_a_factor_in_either_direction():
    assert error(0.5) == pytest.approx(1.0) and error(2.0) == pytest.approx(1.0) and error(1.0) == 0
    assert median_and_worst({"a": 1.1, "b": 0.5, "c": 1.0}) == (pytest.approx(0.1), pytest.approx(1.0))


def test_what_the_clusters_were_fitted_to_is_planned_well(planned: list[dict[str, Any]]):
    middle, worst = median_and_worst({one["name"]: one["planned"] / one["published"] for one in planned if one["kind"] == "calibration"})
    assert middle <= 0.10 and worst <= 0.25


def test_no_error_grows(planned: list[dict[str, Any]]):
    """Where one shrinks, `python benchmarks/plan_accuracy.py --write` writes the new figure, which docs/planning.md gets too."""
    recorded = {row["name"]: row["planned"] for kind in ("calibration", "held_out") for row in WRITTEN[kind]}
    assert set(recorded) == {one["name"] for one in planned}
    for one in planned:
        assert one["error"] <= error(recorded[one["name"]] / one["published"]) + 0.01, one["name"]
        assert one["planned"] == pytest.approx(recorded[one["name"]], rel=0.01), one["name"]
