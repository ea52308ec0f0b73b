"""The pieces of the demo that take no training: its configs, its data, its directory, its conclusion, and how a failing stage ends it."""

from __future__ import annotations

import html
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import load_module
from training_jobs import read_rows, write_rows

from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.reward_model import TrainRewardModel
from aligner.algorithms.sft import TrainSFT
from aligner.settings.compose import compose

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """examples/demo/run.py as a module; it imports its neighbour as a script does."""
    monkeypatch.syspath_prepend(str(DEMO))
    yield load_module(DEMO / "run.py", "demo_run")
    for name in ("demo_run", "arithmetic", "screen"):
        sys.modules.pop(name, None)


def write_run(directory: Path, values: list[dict[str, float]]) -> None:
    directory.mkdir(parents=True)
    write_rows(directory / "metrics.jsonl", ({"step": step, "time": 100.0 + step, **metrics} for step, metrics in enumerate(values)))


@pytest.fixture
def finished(demo, tmp_path):
    """A function that writes what the stages leave behind, with the given accuracies of the PPO run, and returns the demo's exit code."""

    def conclude(*accuracies: float, log: bytes = b"", picture: Path | None = None) -> int:
        write_run(tmp_path / "sft", [{"sft/loss": 1.0}, {"sft/loss": 0.5}])
        write_run(tmp_path / "reward_model", [{"validation/accuracy": 0.5}, {"validation/accuracy": 0.9375}])
        learnt = {"learnt/samples_seen": 256.0, "optim/updates": 4.0}
        steps = [{"validation/accuracy": value, "rollout/reward": value - 0.5, **learnt} for value in accuracies]
        write_run(tmp_path / "ppo", steps)
        files = demo.generate(1, tmp_path / "data")
        sums = read_rows(files.validation)[:3]
        for folder in ("logs", "validation"):
            (tmp_path / "ppo" / folder).mkdir()
        (tmp_path / "ppo" / "logs" / "actor.0.log").write_bytes(log)
        for step, wrong in ((0, 2), (len(accuracies) - 1, 1)):  # the first so many are answered with 0
            rows = [{"prompt": row["prompt"], "response": "0" if i < wrong else row["answer"]} for i, row in enumerate(sums)]
            write_rows(tmp_path / "ppo" / "validation" / f"step_{step:06d}.jsonl", rows)
        return demo._conclude(tmp_path, [replace(stage, took=30.0) for stage in demo.STAGES], files, picture)

    return conclude


def test_every_stage_composes_with_what_the_demo_gives_it(demo, tmp_path):
    files = demo.generate(1, tmp_path / "data")
    sft = compose(TrainSFT, "sft", demo._sft(tmp_path, files))
    reward_model = compose(TrainRewardModel, "reward_model", demo._reward_model(tmp_path, files))
    ppo = compose(TrainPPO, "ppo", demo._ppo(tmp_path, files, 7))
    assert reward_model.model.path == ppo.model.path == str(Path(sft.run.directory) / "checkpoints" / "policy")
    trained = str(Path(reward_model.run.directory) / "checkpoints" / "reward_model")
    assert (ppo.critic.model.path, ppo.reward.model.path) == (trained, trained)
    assert ppo.reward.serve and not ppo.reward.function.path, "the reward has to come from the reward model"
    assert ppo.loop.validate_first and ppo.loop.max_steps == 7
    default = compose(TrainPPO, "ppo", demo._ppo(tmp_path, files, 0))
    assert default.loop.max_steps % default.loop.validate_every == 0, "the last step has to be validated"


def test_validation_problems_are_in_no_training_file_and_all_validated(demo, tmp_path):
    files = demo.generate(1, tmp_path / "data")
    prompts = {name: [row["prompt"] for row in read_rows(getattr(files, name))] for name in files.__slots__[1:]}
    held_out = set(prompts["validation"])
    assert set(prompts["validation_pairs"]) == held_out
    assert held_out.isdisjoint(prompts["sft"] + prompts["pairs"] + prompts["prompts"])
    ppo = compose(TrainPPO, "ppo", demo._ppo(tmp_path, files, 0))
    assert ppo.data.num_validation_prompts == len(prompts["validation"])


def test_last_screen_gives_accuracy_before_and_after(demo, finished, tmp_path, capsys):
    assert finished(0.25, 0.5, 0.875) == 0
    out = capsys.readouterr().out
    assert "25.0% → 87.5%" in out and "in 1m30s" in out
    bars = {line.split()[0]: line for line in out.splitlines() if "PPO  " in line and "%" in line}
    assert bars["before"].count("█") == 8 and bars["after"].count("█") == 26, "of 30"
    assert "judges 93.8% of new pairs right" in out and "mean score -0.25 → +0.38" in out
    assert "sampled 768 responses, learnt from them in 12 updates" in out
    assert "scored 1,368 responses" in out, "768, and 200 at each of three validations"
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    answers = read_rows(tmp_path / "data" / "validation.jsonl")[:3]
    for row, before, after in zip(answers, "✗✗✓", "✗✓✓", strict=True):
        line = next(line for line in out.splitlines() if row["prompt"] in line)
        own = line[line.index(row["prompt"]) :].split()[1:5]
        right = row["answer"]
        assert own == [right if mark == "✓" else "0" for mark in before] + [before] + [right if after == "✓" else "0", after]


@pytest.mark.parametrize("accuracies", [(0.25, 0.25), (0.5, 0.75, 0.25)])
def test_no_rise_is_a_failure(finished, capsys, accuracies):
    assert finished(*accuracies) == 1
    assert "did not rise" in capsys.readouterr().err


def test_picture_shows_what_was_drawn_last_and_loads_nothing(finished, tmp_path):
    first, last = (f"\x1b[1mstep {step}/2\x1b[0m\r\n".encode() for step in (1, 2))
    log = b"started\r\n\x1b[?25l" + first + b"\r\x1b[2K\x1b[1A\x1b[2K" + last + b"\x1b[?25hwritten to /somewhere\r\n"
    assert finished(0.25, 0.5, log=log, picture=tmp_path / "images" / "demo.svg") == 0
    svg = (tmp_path / "images" / "demo.svg").read_text()
    text = html.unescape(svg).replace("\xa0", " ")
    assert "step 2/2" in text and "step 1/2" not in text and "/somewhere" not in text and "25.0%" in text
    assert "@font-face" not in svg and "url(http" not in svg


def test_only_a_former_demo_is_replaced(demo, tmp_path):
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    assert not demo._prepare(foreign)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    own = tmp_path / "demo"
    assert demo._prepare(own)
    (own / "left_over").touch()
    assert demo._prepare(own)
    assert not (own / "left_over").exists()


def test_a_failed_stage_ends_the_demo_with_its_exit_code(demo, tmp_path, monkeypatch, capsys):
    started = []

    def launch(recipe: str, overrides: list[str]) -> int:
        started.append(recipe)
        return 37 if recipe == "reward_model" else 0

    monkeypatch.setattr(demo, "launch_local", launch)
    monkeypatch.setattr(sys, "argv", ["run.py", "--directory", str(tmp_path / "demo")])
    assert demo.main() == 37
    assert started == ["sft", "reward_model"]
    assert str(tmp_path / "demo" / "reward_model" / "logs") in capsys.readouterr().err
