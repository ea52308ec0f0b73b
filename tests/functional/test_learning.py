"""Learning, shortened: the sanity run of the field, and the programs of examples/learning, which make their start, train some of their
cases from it and find that they learnt, with what they compute with. The whole tables are run by hand (docs/learning.md)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resumed_runs import kill_when
from training_jobs import ROOT, SAYS_77, Job, grpo_settings, launcher, run_job, series, train

from aligner.losses.advantages import Estimator
from aligner.losses.policy import Objective
from aligner.reporting.diagnosis import diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.jsonl import read_metrics

pytestmark = pytest.mark.timeout(900)
EXAMPLES = ROOT / "examples" / "learning"
# Less of everything: a start from fewer steps, and steps of a higher learning rate.
SFT = ("loop.max_steps=30", "algorithm.batch_size=64", "model.micro_batch_size=64")
STEPS = 30


def test_grpo_learns_a_fixed_string(task: Path) -> None:
    """From random weights, by a reward of 1 for it. PPO's run is in test_ppo_end_to_end.py."""
    run = task / "run"
    run_job(train("grpo"), run, [*grpo_settings(task), *SAYS_77, "loop.max_steps=35", "run.export_hf=false"])
    rewards = series(run, "rollout/reward")
    assert sum(rewards[:3]) / 3 < 0.2  # chance gives 2 %
    assert sum(rewards[-5:]) / 5 > 0.9
    assert max(series(run, "rollout/logprob_gap")) < 1e-4


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of examples/learning by name; they import their neighbours as scripts do."""
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    known = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in set(sys.modules) - known:
            if (EXAMPLES / f"{name}.py").exists() or name == "arithmetic":
                del sys.modules[name]


def launch(recipe: str, directory: Path, settings: Sequence[str]) -> float:
    run_job(launcher(recipe), directory, list(settings))
    return 1.0


@pytest.mark.slow
def test_a_short_case_learns(example: SimpleNamespace, tmp_path: Path) -> None:
    learning = example.run
    case = next(case for case in learning.CASES if case.name == "reinforce")
    short = replace(case, settings=(*case.settings, f"loop.max_steps={STEPS}", "optimizer.lr=6e-4"), margin=0.02)
    assert learning.run(tmp_path / "out", [short], learning.Options(sft=SFT, samples=8), launch) == 0
    (row,) = json.loads((tmp_path / "out" / "learning.json").read_text())["cases"]
    assert row["passed"] and row["rollouts"] == 128 * STEPS
    assert row["train_after"] > row["train_before"] + 0.1 and 0.05 < row["kl"] < 1, row
    assert "| reinforce |" in (tmp_path / "out" / "learning.md").read_text()
    diagnosis = diagnose(read_metrics(tmp_path / "out" / "reinforce" / "metrics.jsonl"), RULES)
    assert diagnosis.num_steps == STEPS and not diagnosis.findings, diagnosis.text()


def test_there_is_a_case_for_every_estimator_and_objective(example: SimpleNamespace) -> None:
    names = {case.name for case in example.run.CASES}
    assert {estimator.value for estimator in Estimator} | {objective.value for objective in Objective} <= names
    presets = [
        setting.removeprefix("algorithm=") for case in example.run.CASES for setting in case.settings if setting.startswith("algorithm=")
    ]
    assert len(presets) > 10 and all((ROOT / "conf" / "grpo" / "algorithm" / f"{preset}.yaml").is_file() for preset in presets)


def test_a_case_that_misses_its_margin_or_ends_badly_is_an_error(example: SimpleNamespace, tmp_path: Path) -> None:
    row = {"name": "x", "reward_before": 0.25, "train_before": 0.5, "train_after": 0.5, "kl": 0.1, "rollouts": 8, "cpu_seconds": 1.0}
    rows = [example.run.Row(**row, reward_after=after, margin=0.125) for after in (0.375, 0.25)]
    assert [row.passed for row in rows] == [True, False]
    example.run.write(tmp_path, rows, {"y": "exit code 1"})
    text = (tmp_path / "learning.md").read_text()
    assert text.count("learns") == 1 and text.count("MISSES") == 1 and "failed: exit code 1" in text


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


@pytest.mark.slow
def test_steerlm_moves_the_requested_attribute(example: SimpleNamespace, tmp_path: Path) -> None:
    """Labels are the rule's for most stories; SteerLM 1 moves the attribute, and SteerLM 2, on what it sampled, moves it further. One job
    of each kind that writes is killed when its first part is there, and started again."""

    def start(recipe: str, directory: Path, settings: Sequence[str]) -> None:
        command, own = train(recipe), [*settings, "logging.tensorboard=false", "logging.progress=plain"]
        part = directory / "written" / "parts" / "part_000000.jsonl"
        if directory.name not in ("labels", "response"):
            return run_job(command, directory, own) and None
        with Job(command, directory, [*own, "algorithm.part_size=20"]) as job:
            kill_when(job, part.exists)
        first = part.read_bytes()
        run_job(command, directory, [*own, "algorithm.part_size=20"])
        assert part.read_bytes() == first

    found = example.steerlm.run(tmp_path, start)
    labelled = [record["conversations"][-1] for record in example.steerlm.read(tmp_path / "labels" / "written" / "records.jsonl")]
    right = sum(turn["label"] == f"joy:{example.steerlm.joy(turn['value'])}" for turn in labelled)
    assert len(labelled) == 400 and right >= 300
    groups = example.steerlm.read(tmp_path / "attributes" / "written" / "records.jsonl")
    assert {len(group["responses"]) for group in groups} == {8}
    assert all(json.dumps(one["log(Q(y|a,x))"]) for group in groups for one in group["responses"])
    assert found.passed, found
