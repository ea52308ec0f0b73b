"""The `aligner` command and the entry scripts as far as they need no model: options, help, refusals."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from aligner import cli
from aligner.config import conf_directory, from_yaml
from aligner.jobs.programs import RECIPES
from aligner.schemas import (
    Annotate,
    ConstitutionalAI,
    Generate,
    TrainDistillation,
    TrainDPO,
    TrainGRPO,
    TrainKTO,
    TrainOnlineDistillation,
    TrainOnlineDPO,
    TrainPPO,
    TrainProcessRewardModel,
    TrainRegressionRewardModel,
    TrainRejectionSampling,
    TrainRewardModel,
    TrainSelfRewarding,
    TrainSFT,
    TrainSPIN,
    TrainSteerLM2,
    WriteProposals,
    WriteTeacherLogprobs,
)

SCRIPTS = sorted((Path(__file__).parents[2] / "examples" / "nlp").glob("*.py"), key=lambda path: path.name)
SCHEMAS = {
    "train_sft": TrainSFT,
    "train_reward_model": TrainRewardModel,
    "train_regression_reward_model": TrainRegressionRewardModel,
    "train_process_reward_model": TrainProcessRewardModel,
    "train_dpo": TrainDPO,
    "train_kto": TrainKTO,
    "train_steerlm": TrainSFT,
    "train_grpo": TrainGRPO,
    "train_ppo_actor": TrainPPO,
    "train_online_dpo": TrainOnlineDPO,
    "train_rejection_sampling": TrainRejectionSampling,
    "distill": TrainDistillation,
    "train_steerlm2": TrainSteerLM2,
    "write_teacher_logprobs": WriteTeacherLogprobs,
    "generate": Generate,
    "annotate": Annotate,
    "constitution": ConstitutionalAI,
    "write_proposals": WriteProposals,
    "train_online_distill": TrainOnlineDistillation,
    "train_spin": TrainSPIN,
    "train_self_rewarding": TrainSelfRewarding,
    "serve_critic": TrainPPO,
    "serve_reward_model": TrainPPO,
}
WRITERS = ("annotate", "constitution", "generate", "write_proposals", "write_teacher_logprobs")  # they write a data set and train nothing
TRAINERS = [script for script in SCRIPTS if script.stem not in WRITERS]


def start(script: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run an entry script in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_every_script_is_known_here() -> None:
    assert {script.stem for script in SCRIPTS} == set(SCHEMAS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path, monkeypatch, capsys) -> None:
    assert start(script, "--help", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: {script.name} [config=NAME] [key=value ...]")
    assert "data.train=(required)" in out
    assert ("loop.max_steps=100" in out) == (script in TRAINERS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_cfg_shows_what_is_missing_and_what_is_given(script: Path, monkeypatch, capsys) -> None:
    assert start(script, "--cfg", "run.seed=5", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "  train: ???\n" in out and "  seed: 5\n" in out
    assert start(script, "--cfg", "data.train=x.jsonl", monkeypatch=monkeypatch) == 0
    config = from_yaml(SCHEMAS[script.stem], capsys.readouterr().out)
    assert config.data.train == "x.jsonl"


@pytest.mark.parametrize("script", TRAINERS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["++loop.max_stepps=4"], "did you mean loop.max_steps?"),
        (["loop.max_steps=0", "data.train=x"], "loop.max_steps=0: must be at least 1"),
        (["loop.max_steps=many"], "loop.max_steps"),
        (["--max-steps=4"], "unknown option --max-steps=4; settings are written key=value"),
        ([], "data.train is required"),
    ],
)
def test_refused_with_exit_code_2_and_one_line(script: Path, arguments, text: str, monkeypatch, capsys) -> None:
    assert start(script, *arguments, monkeypatch=monkeypatch) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert text in stderr


def test_a_misspelt_key_of_grpo(monkeypatch, capsys) -> None:
    script = next(script for script in SCRIPTS if script.stem == "train_grpo")
    assert start(script, "++algorithm.group_sise=4", monkeypatch=monkeypatch) == 2
    assert "did you mean algorithm.group_size?" in capsys.readouterr().err


def test_the_reward_server_knows_the_online_recipes(monkeypatch, capsys) -> None:
    script = next(script for script in SCRIPTS if script.stem == "serve_reward_model")
    assert start(script, "recipe=grpo", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
    assert isinstance(from_yaml(TrainGRPO, capsys.readouterr().out), TrainGRPO)
    assert start(script, "recipe=dpo", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == "error: recipe=dpo; allowed: ppo, grpo, online_dpo, rejection_sampling\n"


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["launch", "local", "--help"]])
def test_help_of_the_command(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "usage: aligner" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["lanch"], ["launch"], ["convert"], ["launch", "local"]])
def test_usage_errors_of_the_command(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_refused_launch(capsys) -> None:
    assert cli.main(["launch", "local", "ppo", "data.train=x", "++algorithm.group_sise=4"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown setting algorithm.group_sise in")
    assert cli.main(["launch", "local", "nothing"]) == 2
    assert capsys.readouterr().err == f"error: config 'nothing': its name must begin with one of {', '.join(RECIPES)}\n"


def test_conf_is_beside_the_package() -> None:
    assert (conf_directory() / "ppo.yaml").is_file()


def test_a_job_file_is_chosen_by_name(monkeypatch, capsys):
    by_name = {script.stem: script for script in SCRIPTS}
    actor, reward = by_name["train_ppo_actor"], by_name["serve_reward_model"]
    assert start(actor, "config=ppo_8b", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
    assert "runs/ppo_8b" in capsys.readouterr().out
    assert start(reward, "config=grpo_70b", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
    assert "runs/grpo_70b" in capsys.readouterr().out
    assert start(reward, "config=online_dpo_70b", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
    assert "runs/online_dpo_70b" in capsys.readouterr().out
    assert start(actor, "config=sft_70b", monkeypatch=monkeypatch) == 2
    assert "config=sft_70b: this program is of ppo; allowed: ppo, ppo_175b, ppo_70b, " in capsys.readouterr().err


def test_a_refused_slurm_launch(capsys) -> None:
    assert cli.main(["launch", "slurm", "dpo_70b"]) == 2
    assert capsys.readouterr().err.startswith("error: data.train is required")
    assert cli.main(["launch", "slurm", "dpo_70b", "data.train=x", "num_processes=12", "parallel.tp=4", "parallel.pp=1"]) == 2
    assert "they must fill nodes" in capsys.readouterr().err


def test_settings_stand_before_and_behind_options(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(cli, "_validate_data", lambda arguments: seen.append(arguments) or 0)
    command = ["data", "validate", "pairs.jsonl", "data.add_bos=false", "--kind", "preference", "--samples", "1", "data.max_length=64"]
    assert cli.main(command) == 0
    assert (seen[0].target, seen[0].overrides, seen[0].kind) == ("pairs.jsonl", ["data.add_bos=false", "data.max_length=64"], "preference")
    for wrong in ("--unknown=1", "max_length"):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*command, wrong])
    assert "unrecognized arguments: data.max_length=64 max_length" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", "runs/x", "--open", "a=b"])
