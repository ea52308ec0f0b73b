"""The supervised and preference table, shortened: a run of SFT and one of DPO through the program's own code, and what it computes with.

The whole table is run by hand (docs/learning.md).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_jobs import ROOT, launcher, run_job

pytestmark = pytest.mark.timeout(600)
MODULES = "bench evaluate exported intervals launching policy_cases reward_cases steerlm steerlm_cases stories supervised".split()


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of examples/learning by name; they import their neighbours as scripts do."""
    sys.path.insert(0, str(ROOT / "examples" / "learning"))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(ROOT / "examples" / "learning"))
        for name in MODULES:
            sys.modules.pop(name, None)


def launch(recipe: str, directory: Path, settings: Sequence[str]) -> float:
    run_job(launcher(recipe), directory, list(settings))
    return 1.0


@pytest.mark.shared
def test_short_runs_learn(example: SimpleNamespace, shared_data: Path, tmp_path: Path) -> None:
    options = example.bench.Options(steps=8, names=6, held_out_names=2, beginnings=6, told=8, judged=8)
    bench = example.bench.Bench(tmp_path, shared_data / "stories260k", shared_data, options, launch)
    (fallen,) = example.supervised.CASES["sft"](bench)
    assert fallen.high < fallen.before - 0.2 and fallen.passed == (fallen.high < fallen.needed), fallen
    margin, wins = example.supervised.CASES["dpo"](bench)
    assert margin.passed and margin.low > margin.before, margin
    assert wins.after > 0.5 and 0 < wins.low < wins.after < wins.high < 1, wins
    trained_on = [json.loads(line) for line in (tmp_path / "data" / "pairs.jsonl").read_text().splitlines()]
    held_out = [json.loads(line)["prompt"] for line in (tmp_path / "data" / "pairs_held_out.jsonl").read_text().splitlines()]
    assert held_out and not {pair["prompt"] for pair in trained_on} & set(held_out)
    assert all(example.stories.score(_told(pair, "chosen")) > example.stories.score(_told(pair, "rejected")) for pair in trained_on)


def _told(pair: dict, which: str) -> dict:
    return {"prompt": pair["prompt"], "response": pair[which]}


@pytest.mark.shared
def test_every_human_pair_is_held_out_once(example: SimpleNamespace, shared_data: Path, tmp_path: Path) -> None:
    source, folds = shared_data / "hh_harmless" / "comparisons.jsonl", example.reward_cases.FOLDS
    files = [example.reward_cases.hh_fold(source, tmp_path / str(fold), fold) for fold in range(folds)]
    counts = [(len(example.stories.read(one.train)), len(example.stories.read(one.held_out))) for one in files]
    assert {train + held_out for train, held_out in counts} == {1496}  # four of 1,500 have a blank response
    assert sum(held_out for _, held_out in counts) == 1496 and min(held_out for _, held_out in counts) > 400


def test_intervals(example: SimpleNamespace) -> None:
    intervals = example.intervals
    low, high = intervals.wilson(8, 10)  # worked out by hand: (0.8 + z2/20 -+ z sqrt(0.016 + z2/400)) / (1 + z2/10), z2 = 3.8415
    assert (low, high) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    assert intervals.wilson(0, 10)[0] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="3 of 2"):
        intervals.wilson(3, 2)
    rows = torch.tensor([[1.0, 1.0], [0.0, 1.0]] * 200)
    value, low, high = intervals.bootstrap(rows, intervals.ratio)
    assert value == 0.5 and (low, high) == pytest.approx((0.451, 0.549), abs=0.006)  # 0.5 -+ 1.96 * 0.5 / 20
    assert intervals.bootstrap(rows, intervals.ratio) == (value, low, high)
    x, y = torch.tensor([0.0, 1, 2, 3]), torch.tensor([1.0, 3, 5, 7])
    line = torch.stack([torch.ones(4), x, y, x * x, y * y, x * y], dim=1)
    assert intervals.correlation(line.sum(0, keepdim=True)).item() == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 2"):
        intervals.bootstrap(rows[:1], intervals.ratio)


def test_the_rules_of_the_stories(example: SimpleNamespace) -> None:
    stories, rng = example.stories, random.Random(1)
    glad, sad = {"prompt": "p", "response": "A friend had fun."}, {"prompt": "p", "response": "It rained."}
    assert stories.pairs_of([sad, glad]) == [{"prompt": "p", "chosen": "A friend had fun.", "rejected": "It rained."}]
    assert stories.pairs_of([sad, sad]) == []
    assert stories.whole({"prompt": "p", "response": ' He said "no." Then'})["response"] == ' He said "no."'
    assert stories.attributes('"Hi," said the friend.') == [1.0, 1.0, 0.4]
    told = {"prompt": "p", "response": " The cat sat down. The dog ran off quickly. They were tired of it."}
    found = [stories.stepped(told, rng) for _ in range(40)]
    spoilt = [one["labels"].index(False) for one in found if False in one["labels"]]
    assert set(spoilt) == {0, 1, 2} and 10 < len(spoilt) < 30
    assert all(sum(not label for label in one["labels"]) <= 1 and len(one["steps"]) == 3 for one in found)
    assert stories.in_disorder("He sat.", rng) == "He sat."


def test_a_row_passes_with_its_whole_interval(example: SimpleNamespace, tmp_path: Path) -> None:
    common = {"before": 0.5, "needed": 0.55, "note": "n"}
    rows = [
        example.bench.Row.of("up", "m", (0.65, 0.56, 0.7), **common),
        example.bench.Row.of("up", "m", (0.65, 0.54, 0.7), **common),
        example.bench.Row.of("down", "m", (0.45, 0.4, 0.5), rises=False, **common),
    ]
    assert [row.passed for row in rows] == [True, False, True]
    example.supervised.write(tmp_path, rows, {"lost": "exit code 1"})
    text = (tmp_path / "supervised.md").read_text()
    assert text.count("learns") == 2 and text.count("MISSES") == 1 and "| lost " in text and "failed: exit code 1" in text
    lines = text.splitlines()
    assert len({line.count("|") for line in lines}) == 1, lines
