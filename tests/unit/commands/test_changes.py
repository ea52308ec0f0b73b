"""A run directory is one experiment's: what differs from the settings of its newest checkpoint is listed, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aligner.algorithms.dpo import TrainDPO
from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.sft import TrainSFT
from aligner.cluster.run_directory import CRITIC, POLICY, RunDirectory
from aligner.errors import ConfigError
from aligner.models.checkpoint import files
from aligner.run.session import _open, check_changes
from aligner.settings.compose import from_yaml, to_yaml

FIRST = ("data.train=a.jsonl", "model.path=m", "reward.function.path=f", "reward.function.arguments.target=7")


def settings(*changes: str, schema: type = TrainGRPO) -> str:
    return to_yaml(from_yaml(schema, "", [*FIRST[: 4 if schema is TrainGRPO else 2], *changes]))


@pytest.fixture(scope="module")
def first() -> str:
    return settings()


def saved(tmp_path: Path, text: str, *, step: int = 3, folder: str = POLICY) -> RunDirectory:
    """A run directory with a checkpoint that was made with these settings."""
    run = RunDirectory(tmp_path / "run").create()
    writing = files.new_writing_directory(files.step_directory(run.checkpoints / folder, step))
    (writing / "config.yaml").write_text(text)
    (writing / files.MANIFEST).write_text("{}\n")
    files.write_marker(writing, {"step": step})
    files.publish(writing, files.step_directory(run.checkpoints / folder, step))
    return run


def check(run: RunDirectory, text: str, allowed: bool = False) -> str:
    return check_changes(run, TrainGRPO, text, allowed=allowed)


def test_the_same_settings_say_nothing(tmp_path, first):
    assert check(saved(tmp_path, first), first) == ""


def test_a_directory_without_a_checkpoint_has_nothing_to_protect(tmp_path, first):
    run = RunDirectory(tmp_path / "run").create()
    run.config.write_text(first)  # of a first start that failed
    assert check(run, settings("run.seed=2")) == ""


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ("run.seed=2", "run.seed: 1 -> 2"),
        ("data.train=b.jsonl", "data.train: a.jsonl -> b.jsonl"),
        ("model.path=n", "model.path: m -> n"),
        ("algorithm.mini_batch_size=64", "algorithm.mini_batch_size: 512 -> 64"),
        ("optimizer.lr=1e-3", "optimizer.lr: 9e-07 -> 0.001"),
        ("reward.function.arguments.target=8", "reward.function.arguments.target: 7 -> 8"),
        ("reward.function.arguments.more=8", "reward.function.arguments.more: (not set) -> 8"),
        ("rollout.sampling.temperature=0.5", "rollout.sampling.temperature: 1.0 -> 0.5"),
    ],
)
def test_another_experiment_is_refused(tmp_path, first, change, listed):
    run, text = saved(tmp_path, first), settings(change)
    with pytest.raises(
        ConfigError, match=rf"checkpoint step_000003 was made with other settings: {re.escape(listed)}\. .*run.allow_changes=true"
    ):
        check(run, text)
    assert check(run, text, allowed=True) == f"warning: settings changed since step_000003: {listed}"


def test_what_changes_no_experiment_is_listed(tmp_path, first):
    changes = {
        "run.stall_timeout_seconds": "99.0",
        "loop.max_steps": "7",
        "parallel.tp": "2",
        "num_processes": "2",
        "model.micro_batch_size": "1",
        "logging.tensorboard": "false",
        "checkpoint.keep": "3",
        "rollout.max_batch_size": "16",
        "reward.function.timeout_seconds": "9.0",
        "slurm.partition": "gpu",
    }
    found = check(saved(tmp_path, first), settings(*(f"{name}={value}" for name, value in changes.items())))
    assert found.startswith("settings changed since step_000003: ")
    assert all(re.search(rf"{re.escape(name)}: \S* -> {value}(;|$)", found, re.I) for name, value in changes.items())


def test_the_newest_checkpoint_says_what_was_changed(tmp_path, first):
    saved(tmp_path, first, step=3)
    changed = settings("run.seed=2")
    run = saved(tmp_path, changed, step=6)
    assert check(run, changed) == ""
    saved(tmp_path, first, step=9, folder=CRITIC)  # a critic's alone is none of the run's
    assert check(run, changed) == ""


def test_settings_of_another_version_or_recipe(tmp_path, first):
    """One that this version has and the checkpoint lacks is new; one of another kind of run is another experiment."""
    older = "\n".join(line for line in first.splitlines() if "tau_pos" not in line) + "\n"
    assert older != first and check(saved(tmp_path, older), first) == ""
    sft, dpo = settings(schema=TrainSFT), settings(schema=TrainDPO)
    for schema, before, now, name in ((TrainDPO, sft, dpo, "sft"), (TrainSFT, dpo, sft, "dpo")):
        run = saved(tmp_path, before)
        with pytest.raises(ConfigError, match=f": this is a run of {name}; name another directory"):
            check_changes(run, schema, now, allowed=False)


@pytest.mark.parametrize("text", ["", "{", "[1]\n"])
def test_a_damaged_file_is_found_by_who_loads_it(tmp_path, first, text):
    assert check(saved(tmp_path, text), first) == ""


def test_a_refused_start_changes_nothing_in_the_directory(tmp_path, first, capsys):
    run = saved(tmp_path, first)
    config = from_yaml(TrainGRPO, first)
    _open(run, "actor", "grpo", config, first)
    config.run.seed = 2
    with pytest.raises(ConfigError, match="run.seed: 1 -> 2"):
        _open(run, "actor", "grpo", config, to_yaml(config))
    assert run.config.read_text() == first
    config.run.allow_changes = True
    _open(run, "actor", "grpo", config, to_yaml(config))
    assert (
        "seed: 2" in run.config.read_text() and "warning: settings changed since step_000003: run.seed: 1 -> 2" in capsys.readouterr().out
    )
