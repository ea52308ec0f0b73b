from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aligner.errors import DataError
from aligner.reporting.jsonl import MetricsFile, read_metrics


def _steps(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, record.values) for record in read_metrics(path)]


def _write(path: Path, *steps: int, resumed_step: int = 0) -> MetricsFile:
    file = MetricsFile(path, resumed_step=resumed_step)
    for step in steps:
        file.write(step, {"loss/x": step / 2})
    file.close()
    return file


def test_nan_and_infinities_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    file.close()

    def refuse(token: str) -> float:
        pytest.fail(f"{token} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert (line["step"], line["a"], line["b"], line["c"]) == (1, "NaN", "Infinity", "-Infinity") and line["time"] > 1.6e9
    ((_, values),) = _steps(path)
    assert math.isnan(values["a"]) and values["b"] == math.inf and values["c"] == -math.inf


def test_resume_cuts_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2, 3, 4, 5)
    resumed = _write(path, 4, 5, 6, resumed_step=3)
    assert resumed.num_cut == 2
    assert [step for step, _ in _steps(path)] == [1, 2, 3, 4, 5, 6]
    _write(path, 1)
    assert [step for step, _ in _steps(path)] == [1]  # a new start begins anew


def test_the_same_step_again_is_merged_into_its_line_also_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"a": 1.0})
    file.write(2, {"a": 2.0, "b": 100.0})
    file.write(2, {"b": 3.0})
    file.close()
    assert _steps(path) == [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 3.0})]
    file = MetricsFile(path, resumed_step=2)
    file.write(2, {"c": 4.0})
    file.write(3, {"a": 5.0})
    file.close()
    assert _steps(path) == [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 3.0, "c": 4.0}), (3, {"a": 5.0})]


def test_steps_may_not_go_back_and_reserved_names_are_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(2, {"a": 1.0})
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        file.write(1, {"a": 1.0})
    with pytest.raises(ValueError, match="called 'time'"):
        file.write(3, {"time": 1.0})


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-5])  # killed while writing step 2
    assert [step for step, _ in _steps(path)] == [1]
    _write(path, 2, resumed_step=1)
    assert [step for step, _ in _steps(path)] == [1, 2]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "ti\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: not a line of metrics"):
        read_metrics(path)
