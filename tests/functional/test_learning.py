"""Learning, shortened: the program of examples/learning makes its start, trains one of its cases from it and finds that it learnt.

The whole table is run by hand (docs/learning.md).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from training_jobs import ROOT, launcher, run_job

from aligner.losses.advantages import Estimator
from aligner.losses.policy import Objective
from aligner.reporting.diagnosis import diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.jsonl import read_metrics

pytestmark = pytest.mark.timeout(600)
# Less of everything: a start from fewer steps, and steps of a higher learning rate.
SFT = ("loop.max_steps=30", "algorithm.batch_size=64", "model.micro_batch_size=64")
STEPS = 30


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """examples/learning/run.py; it imports its neighbours as a script does."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "learning"), *sys.path])
    spec = importlib.util.spec_from_file_location("learning_run", ROOT / "examples" / "learning" / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    for name in ("cases", "evaluate", "launching", "arithmetic"):
        sys.modules.pop(name, None)


def launch(recipe: str, directory: Path, settings: Sequence[str]) -> float:
    run_job(launcher(recipe), directory, list(settings))
    return 0.0


@pytest.mark.slow
def test_a_short_case_learns(learning: ModuleType, tmp_path: Path) -> None:
    case = next(case for case in learning.CASES if case.name == "reinforce")
    short = replace(case, settings=(*case.settings, f"loop.max_steps={STEPS}", "optimizer.lr=6e-4"), margin=0.02)
    assert learning.run(tmp_path / "out", [short], learning.Options(sft=SFT, samples=8), launch) == 0
    (row,) = json.loads((tmp_path / "out" / "learning.json").read_text())["cases"]
    assert row["passed"] and row["rollouts"] == 128 * STEPS
    assert row["train_after"] > row["train_before"] + 0.1 and 0.05 < row["kl"] < 1, row
    assert "| reinforce |" in (tmp_path / "out" / "learning.md").read_text()
    diagnosis = diagnose(read_metrics(tmp_path / "out" / "reinforce" / "metrics.jsonl"), RULES)
    assert diagnosis.num_steps == STEPS and not diagnosis.findings, diagnosis.text()


def test_there_is_a_case_for_every_estimator_and_objective(learning: ModuleType) -> None:
    names = {case.name for case in learning.CASES}
    assert {estimator.value for estimator in Estimator} | {objective.value for objective in Objective} <= names
    presets = [
        setting.removeprefix("algorithm=") for case in learning.CASES for setting in case.settings if setting.startswith("algorithm=")
    ]
    assert len(presets) > 10 and all((ROOT / "conf" / "grpo" / "algorithm" / f"{preset}.yaml").is_file() for preset in presets)


def test_a_case_that_misses_its_margin_or_ends_badly_is_an_error(learning: ModuleType, tmp_path: Path) -> None:
    row = {"name": "x", "reward_before": 0.25, "train_before": 0.5, "train_after": 0.5, "kl": 0.1, "rollouts": 8, "cpu_seconds": 1.0}
    rows = [learning.Row(**row, reward_after=after, margin=0.125) for after in (0.375, 0.25)]
    assert [row.passed for row in rows] == [True, False]
    learning.write(tmp_path, rows, {"y": "exit code 1"})
    text = (tmp_path / "learning.md").read_text()
    assert text.count("learns") == 1 and text.count("MISSES") == 1 and "failed: exit code 1" in text
