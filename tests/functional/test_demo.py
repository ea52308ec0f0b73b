"""The pieces of the demo that take no training: its configs, its data, its directory, its conclusion, and how a failing stage ends it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.reward_model import TrainRewardModel
from aligner.algorithms.sft import TrainSFT
from aligner.config import compose
from aligner.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """examples/demo/run.py as a module; it imports its neighbour as a script does."""
    monkeypatch.syspath_prepend(str(DEMO))
    spec = importlib.util.spec_from_file_location("demo_run", DEMO / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_run", module)
    spec.loader.exec_module(module)
    yield module
    monkeypatch.delitem(sys.modules, "arithmetic", raising=False)


def write_run(directory: Path, values: list[dict[str, float]]) -> None:
    directory.mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": 100.0 + step, **metrics}) for step, metrics in enumerate(values)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def finished(tmp_path):
    """A function that writes what the stages leave behind, with the given accuracies of the PPO run."""

    def write(*accuracies: float) -> Path:
        write_run(tmp_path / "reward_model", [{"validation/accuracy": 0.5}, {"validation/accuracy": 0.9375}])
        write_run(tmp_path / "ppo", [{"validation/accuracy": value, "rollout/reward": value} for value in accuracies])
        rollouts = tmp_path / "ppo" / "rollouts"
        rollouts.mkdir()
        for step, response in ((1, "9"), (2, "7")):
            row = {"prompt": "3+4=", "response": response, "reward": 1.5, "finish_reason": "stop"}
            (rollouts / f"step_{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
        return tmp_path

    return write


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
    prompts = {name: [json.loads(line)["prompt"] for line in getattr(files, name).read_text().splitlines()] for name in files.__slots__[1:]}
    held_out = set(prompts["validation"])
    assert set(prompts["validation_pairs"]) == held_out
    assert held_out.isdisjoint(prompts["sft"] + prompts["pairs"] + prompts["prompts"])
    ppo = compose(TrainPPO, "ppo", demo._ppo(tmp_path, files, 0))
    assert ppo.data.num_validation_prompts == len(prompts["validation"])


def test_a_misspelt_setting_of_an_experiment_is_refused(demo, tmp_path):
    files = demo.generate(1, tmp_path / "data")
    with pytest.raises(ConfigError, match="kl_coef"):
        compose(TrainPPO, "ppo", [*demo._ppo(tmp_path, files, 0), "algorithm.kl_coeff=1"])


def test_conclusion_gives_accuracy_before_and_after(demo, finished, capsys):
    assert demo._conclude(finished(0.25, 0.5, 0.875)) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("accuracy on held-out"))
    assert "25.0% before" in line and "87.5% after" in line
    assert "93.8% of held-out pairs" in out
    assert "3+4=7 " in out and "3+4=9" not in out, "the samples are those of the last step"


@pytest.mark.parametrize("accuracies", [(0.25, 0.25), (0.5, 0.75, 0.25)])
def test_no_rise_is_a_failure(demo, finished, capsys, accuracies):
    assert demo._conclude(finished(*accuracies)) == 1
    assert "did not rise" in capsys.readouterr().err


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
