"""What is written of the plan's errors; benchmarks/plan_accuracy.py, which CI runs, holds plans to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.commands.calibrate import error, median_and_worst

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


def gains() -> dict[str, float]:
    """Planned / published of what asynchronous jobs gain over the synchronous ones that they are compared with."""
    steps = factors("calibration") | factors("held_out")
    return {row["name"]: steps[row["synchronous"]] / steps[row["name"]] for row in WRITTEN["held_out"] if "synchronous" in row}


def test_jobs_are_planned_as_well_as_the_page_says():
    middle, worst = median_and_worst(factors("calibration"))
    assert middle <= 0.10 and worst <= 0.25
    middle, worst = median_and_worst(factors("held_out"))
    assert middle <= 0.20 and worst <= 0.40
    # The synchronous run of 32 H20 became twice as slow while the asynchronous one did not (docs/plan_accuracy.md).
    assert [name for name, factor in gains().items() if round(abs(factor - 1), 2) > 0.20] == ["Qwen2.5-Math 7B, DAPO ahead, 16 + 16 H20"]


def test_the_page_has_the_figures():
    lines = (ROOT / "docs" / "plan_accuracy.md").read_text().splitlines()
    for wanted in (factors("calibration"), factors("held_out"), gains()):
        for name, factor in wanted.items():
            line = lines.pop(next(number for number, line in enumerate(lines) if line.startswith(f"| {name} |")))
            assert float(line.split("|")[-2]) == pytest.approx(factor, abs=0.006), name
