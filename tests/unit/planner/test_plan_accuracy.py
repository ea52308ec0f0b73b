"""What is written of the plan's errors; benchmarks/plan_accuracy.py, which CI runs, holds plans to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.planner.calibration import error, median_and_worst

ROOT = Path(__file__).parents[3]
WRITTEN = yaml.safe_load((ROOT / "benchmarks" / "published_steps.yaml").read_text())


def factors(kind: str) -> dict[str, float]:
    """Planned / published by job."""

    def published(row: dict[str, Any]) -> float:
        return row["published"].get("step") or next(iter(row["published"].values()))

    return {row["name"]: row["planned"] / published(row) for row in WRITTEN[kind]}


def test_an_error_is_a_factor_in_either_direction():
    assert error(0.5) == pytest.approx(1.0) and error(2.0) == pytest.approx(1.0) and error(1.0) == 0
    assert median_and_worst({"a": 1.1, "b": 0.5, "c": 1.0}) == (pytest.approx(0.1), pytest.approx(1.0))


def test_what_the_clusters_were_fitted_to_is_planned_well():
    middle, worst = median_and_worst(factors("calibration"))
    assert middle <= 0.10 and worst <= 0.25
    assert median_and_worst(factors("held_out"))[0] <= 0.20


def test_the_page_has_the_figures():
    page = (ROOT / "docs" / "planning.md").read_text()
    for kind in ("calibration", "held_out"):
        for name, factor in factors(kind).items():
            (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
            assert float(line.split("|")[-2]) == pytest.approx(factor, abs=0.006), name
