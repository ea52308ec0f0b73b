"""The `aligner` command and the entry scripts as far as they need no model: options, help, refusals."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from aligner import cli
from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.registry import recipes
from aligner.commands.parts import GapOptions, LaunchOptions, PreflightOptions, ValidateOptions
from aligner.settings.compose import from_yaml

SCRIPTS = Path(__file__).parents[2] / "examples" / "nlp"
PROGRAMS = {"train_sft": "sft", "grpo": "grpo", "generate": "generate"}  # that train, sample, write: a script and two recipes -> its recipe


def start(program: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run an entry script, or `aligner train PROGRAM` for a recipe, in this process; its exit code."""
    script = SCRIPTS / f"{program}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    try:
        runpy.run_path(str(script), run_name="__main__") if script.is_file() else cli.main(["train", program, *arguments])
    except SystemExit as end:
        return end.code
    return 0


def test_the_scripts_are_those_of_the_common_recipes_and_servers() -> None:
    written = {path.stem: re.findall(r'^main = (\w+)\("(\w+)"\)$', path.read_text(), re.MULTILINE) for path in SCRIPTS.glob("*.py")}
    names = {"train_sft": "sft", "train_reward_model": "reward_model", "train_dpo": "dpo", "train_grpo": "grpo", "train_ppo_actor": "ppo"}
    expected = {script: [("program", recipe)] for script, recipe in {**names, "train_steerlm": "steerlm"}.items()}
    servers = {"serve_critic": [("server_program", "critic")], "serve_reward_model": [("server_program", "reward")]}
    assert written == expected | servers


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, monkeypatch, capsys) -> None:
    for more in ((), ("run.seed=1",)):  # as it is known without the recipe, and composed
        assert start(program, "--help", *more, monkeypatch=monkeypatch) == 0
        out = capsys.readouterr().out
        command = f"python {SCRIPTS / program}.py" if program == "train_sft" else f"aligner train {program}"
        assert out.startswith(f"usage: {command} [--config-name NAME] [--config-dir DIR] [key=value ...]")
        assert "data.train=(required)" in out
        assert ("loop.max_steps=0" in out) == (program != "generate")


@pytest.mark.parametrize("program", PROGRAMS)
def test_cfg_shows_what_is_missing_and_what_is_given(program: str, monkeypatch, capsys) -> None:
    assert start(program, "--cfg", "run.seed=5", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "  train: ???\n" in out and "  seed: 5\n" in out
    assert start(program, "--cfg", "data.train=x.jsonl", monkeypatch=monkeypatch) == 0
    assert from_yaml(recipes()[PROGRAMS[program]].config, capsys.readouterr().out).data.train == "x.jsonl"


@pytest.mark.parametrize("program", ["train_sft", "grpo"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["++loop.max_stepps=4"], "did you mean loop.max_steps?"),
        (["loop.max_steps=-1", "data.train=x"], "loop.max_steps=-1: must be at least 1"),
        (["loop.max_steps=many"], "loop.max_steps"),
        (["--max-steps=4"], "unknown option --max-steps=4; settings are written key=value; did you mean loop.max_steps=4?"),
        (["--max-steps", "4"], "unknown option --max-steps=4; settings are written key=value; did you mean loop.max_steps=4?"),
        ([], "data.train is required"),
    ],
)
def test_refused_with_exit_code_2_and_one_line(program: str, arguments, text: str, monkeypatch, capsys) -> None:
    assert start(program, *arguments, monkeypatch=monkeypatch) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert text in stderr


def test_the_reward_server_knows_the_online_recipes(monkeypatch, capsys) -> None:
    assert start("serve_reward_model", "recipe=grpo", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
    assert isinstance(from_yaml(TrainGRPO, capsys.readouterr().out), TrainGRPO)
    assert start("serve_reward_model", "recipe=dpo", monkeypatch=monkeypatch) == 2
    able = "grpo, online_distill, online_dpo, ppo, rejection_sampling, self_rewarding, spin"
    assert capsys.readouterr().err == f"error: recipe=dpo: has no reward to serve; allowed: {able}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["convert", "--help"], ["launch", "local", "ppo", "run.seed=1", "--help"]])
def test_help_of_the_command(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["Usage: aligner", *arguments[:-1]]).partition(" ppo")[0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing command"),
        (["lanch"], "No such command 'lanch'"),
        (["launch"], "Missing command"),
        (["launch", "local"], "Missing argument 'CONFIG'"),
        (["plan", "ppo", "--top", "0"], "'--top': 0 is not in the range"),
        (["plan", "ppo", "--top", "many"], "'--top': 'many' is not a valid integer"),
        (["plan", "ppo", "data.train=x", "--serach"], "No such option"),
        (["gap", "grpo", "--tokens", "0"], "'--tokens': 0 is not in the range"),
        (["gap", "grpo", "--ulps=-1"], "'--ulps': -1.0 is not in the range"),
        (["gap", "grpo", "--ulps=nan"], "'--ulps': nan is not finite"),
        (["preflight", "grpo", "--timeout=nan"], "'--timeout': nan is not finite"),
        (["diagnose", "runs/x", "a=b"], "unexpected extra argument"),
        (["diagnose", __file__], "is a file"),
        (["launch", "local", "sft", "--model_name_or_path", "X"], "Settings are written key=value"),
    ],
)
def test_usage_errors_of_the_command(arguments: list[str], text: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("Usage: aligner") and error.startswith("error: ") and text in error


@pytest.mark.parametrize(
    "arguments",
    [[], ["--from-hf", "a"], ["--from-hf", "a", "--to-hf", "b"], ["--from-hf", "a", "--from-megatron", "b", "--to-hf", "c"]],
)
def test_a_conversion_has_one_source_and_one_target(arguments: list[str], capsys) -> None:
    assert cli.main(["convert", *arguments]) == 2
    assert capsys.readouterr().err == "error: convert: use --from-hf with --to-megatron, or --from-megatron with --to-hf\n"


def test_source_and_target_stand_in_any_order(tmp_path: Path, monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr("aligner.commands.convert.convert", lambda options: seen.update(asdict(options)) or 0)
    assert cli.main(["convert", "--to-megatron", str(tmp_path / "to"), "--tp", "2", "--from-hf", str(tmp_path)]) == 0
    assert (seen["from_hf"], seen["to_megatron"], seen["to_hf"]) == (tmp_path, tmp_path / "to", None)
    assert (seen["tp"], seen["pp"]) == (2, 1)


def test_ctrl_c_reaches_the_command_and_its_caller(monkeypatch) -> None:
    def interrupted(**given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("aligner.commands.report.report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["report", "runs/x"])


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("launch local ppo data.train=x ++algorithm.group_sise=4", "unknown setting algorithm.group_sise in"),
        ("launch local nothing", "there is no config 'nothing': there are annotate, constitution, "),
        ("plan ppo_70", "there is no config 'ppo_70': did you mean ppo_70b?\n"),
        ("launch slurm dpo_70b", "data.train is required"),
        ("launch slurm sft data.train=x model.path=y --output /proc/nowhere/job.sub", "/proc/nowhere"),
    ],
)
def test_a_refused_command(command: str, error: str, capsys) -> None:
    assert cli.main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and error in said


def test_a_job_file_is_chosen_by_name(monkeypatch, capsys):
    for program, name in (("train_ppo_actor", "ppo_8b"), ("serve_reward_model", "grpo_70b"), ("serve_reward_model", "online_dpo_70b")):
        assert start(program, f"config={name}", "--cfg", "data.train=x", monkeypatch=monkeypatch) == 0
        assert f"runs/{name}" in capsys.readouterr().out
    assert start("train_ppo_actor", "config=sft_70b", monkeypatch=monkeypatch) == 2
    assert "config=sft_70b: this program is of ppo; allowed: ppo, ppo_175b, ppo_70b, " in capsys.readouterr().err


def test_settings_stand_before_and_behind_options(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("aligner.commands.validate_data.validate", lambda **given: seen.append(given.values()) or 0)
    settings = ["data.add_bos=false", 'data.files=["a b.jsonl", c]', "++x.y=1,2", "~data.validation", "data.separator=' -- '"]
    command = ["data", "validate", "pairs.jsonl", *settings[:2], "--kind", "preference", *settings[2:4], "--samples=1", settings[4]]
    assert cli.main(command) == 0
    target, overrides, options = seen[0]
    assert (target, list(overrides)) == ("pairs.jsonl", settings)
    assert (options.kind, options.num_samples, options.lists_all, options.json_path) == ("preference", 1, False, None)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--unknown=1"])
    assert "No such option" in capsys.readouterr().err
    assert cli.main(["plan", "grpo", "--top", "1", "max_length"]) == 2  # what is no setting is refused where settings are read
    assert "'max_length' is not a setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "work", "options"),
    [
        (["gap", "grpo"], "gap.gap", GapOptions()),
        (["gap", "grpo", "--ulps=2", "--random-prompts"], "gap.gap", GapOptions(ulps=2.0, random_prompts=True)),
        (["launch", "slurm", "ppo_70b", "--output", "x"], "slurm.launch_slurm", LaunchOptions(output=Path("x"))),
        (["data", "validate", "sft", "--all"], "validate_data.validate", ValidateOptions(lists_all=True)),
        (["preflight", "ppo", "--only", "a,b"], "preflight.command.preflight", PreflightOptions(only="a,b")),
    ],
)
def test_options_reach_the_work_of_a_command(words: list[str], work: str, options: object, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(f"aligner.commands.{work}", lambda options, **_: seen.append(options) or 0)
    assert cli.main(words) == 0 and seen == [options]


def completed(shell: str, *words: str) -> list[str]:
    """What `words` (the last one as far as it is typed) can become in a shell, one candidate a line; a process as the shell starts it."""
    line = {"bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}}
    line["zsh"] = line["bash"]
    line["fish"] = {"COMP_WORDS": " ".join(words[:-1]), "COMP_CWORD": words[-1]}
    environ = {**os.environ, "_ALIGNER_COMPLETE": f"{shell}_complete", **line[shell]}
    done = subprocess.run([sys.executable, "-m", "aligner.cli"], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_completion_of_commands_options_and_configs() -> None:
    assert completed("bash", "aligner", "la") == ["plain,launch"]
    assert completed("bash", "aligner", "launch", "slurm", "ppo", "run.seed=1", "--te") == ["plain,--test-only"]
    found = completed("bash", "aligner", "launch", "local", "")
    assert [f"plain,{name}" for name in recipes() if f"plain,{name}" not in found] == []
    assert completed("zsh", "aligner", "plan", "ppo_7") == ["plain", "ppo_70b", "_"]
    assert completed("fish", "aligner", "plan", "sft_") == ["plain,sft_70b"]
    assert completed("bash", "aligner", "data", "validate", "sft_") == ["file,sft_", "plain,sft_70b"]  # or a file
    assert completed("bash", "aligner", "gap", "runs/") == ["dir,runs/"]  # or a directory


@pytest.mark.parametrize(
    "arguments", [["train", "sft", "--help"], ["train", "ppo_70b", "-h", "rollout"], ["train", "dpo", "--help", "all"]]
)
def test_the_help_of_a_config_imports_no_recipe(arguments: list[str]) -> None:
    program = f"""
import json, sys
from aligner import cli
cli.main({arguments})
print(json.dumps(list(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    *text, modules = done.stdout.splitlines()
    assert any("rollout.engine=" in line or "optimizer.lr=" in line for line in text)
    assert not set(json.loads(modules)) & {"torch", "transformers", "datasets", "hydra", "omegaconf", "numpy", "aligner.algorithms"}


def test_help_and_completion_load_nothing_heavy() -> None:
    program = """
import json, sys
from aligner import cli
from aligner.commands import parts
try:
    cli.main(["--help"])
except SystemExit:
    parts.config_names(None, None, "")
    print(json.dumps(list(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    light = ("cli", "commands", "commands.parts", "errors", "files", "version")
    expected = {f"aligner.{name}" for name in (*light, "settings", "settings.command_line")}
    assert {name for name in loaded if name.startswith("aligner.")} == expected
    assert not loaded & {"torch", "hydra", "omegaconf", "rich", "jinja2", "numpy", "argparse"}


@pytest.mark.parametrize(("ends", "code"), [("return 0", 0), ("return 1", 1), ("sys.exit(0)", 0), ("sys.exit(2)", 2)])
def test_the_demo_ends_with_its_own_code(ends: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    (tmp_path / "demo").mkdir()
    text = f"import sys\ndef main():\n    print(sys.argv)\n    {ends}\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (tmp_path / "demo" / "run.py").write_text(text)
    monkeypatch.setattr("aligner.files.shipped", lambda name: tmp_path)
    monkeypatch.setattr(sys, "argv", ["aligner"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["demo", "--steps", "3"]) == code
    said = capsys.readouterr()
    assert said.out == "['aligner demo', '--steps', '3']\n" and said.err == ""
