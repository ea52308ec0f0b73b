"""Settings that name something of the Hub: directories for what reads them, names with commits where settings are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from aligner.algorithms.registry import composed, recipes
from aligner.cluster.run_directory import RunDirectory
from aligner.commands import slurm
from aligner.commands.parts import LaunchOptions
from aligner.commands.plan.command import load
from aligner.commands.slurm import launch_slurm
from aligner.data.sources import read_records
from aligner.errors import ConfigError
from aligner.run.from_hub import _settings, fetch_named, fetch_one, meeting_seconds, with_names
from aligner.run.session import check_changes
from aligner.settings.compose import fingerprint, to_yaml

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
README = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: train/*.jsonl}
  - {split: test, path: test.jsonl}
---
"""
DATA = {
    "README.md": README,
    "train/a.jsonl": b'{"prompt": "1", "response": "2"}\n',
    "train/b.jsonl": b'{"prompt": "3", "response": "4"}\n',
    "test.jsonl": b'{"prompt": "5", "response": "6"}\n',
}


def sft(directory: Path, *overrides: str):
    return composed("sft", [f"run.directory={directory}", "data.train=none", *overrides])


def test_every_path_of_a_model_and_all_data_may_be_names():
    """No recipe has a model's path, a tokenizer or data that stay as they were typed."""
    for recipe in recipes().values():
        config = recipe.config()
        keys = {setting.key for setting in _settings(config)}
        assert {"model.path", "model.tokenizer", "model.lora.path", "data.train", "data.validation"} <= keys, recipe.name
        assert {f"{used.key}.{one}" for used in config.models() for one in ("path", "tokenizer")} <= keys | {"teacher.tokenizer"}
    for name, key in {"ppo": "critic.model.path", "online_distill": "teacher.path", "constitution": "judge.path"}.items():
        assert key in {setting.key for setting in _settings(recipes()[name].config())}


def test_sources_of_a_mixture_may_be_names(hub, tmp_path):
    data = hub.add("org/data", DATA, kind="datasets")
    config = sft(tmp_path / "run", "data.train=[{path: org/data@main, weight: 2}, {path: d.jsonl, weight: 1}]")
    found = fetch_named(config, records=True)
    assert list(found) == ["data.train[0].path"] and config.data.train[1] == {"path": "d.jsonl", "weight": 1}
    assert [raw.value["prompt"] for raw in read_records(config.data.train[0]["path"])] == ["1", "3"]
    assert with_names(config).data.train[0] == {"path": f"org/data@{data}", "weight": 2}


def test_names_become_directories_and_are_recorded_with_their_commits(hub, tmp_path, capsys):
    model, data = hub.add("org/name", MODEL), hub.add("org/data", DATA, kind="datasets")
    given = ("model.path=org/name", "data.train=org/data@main", "data.validation=datasets:org/data:test")
    config = sft(tmp_path / "run", *given)
    assert meeting_seconds(config) == config.run.start_timeout_seconds
    found = fetch_named(config, records=True)
    assert set(found) == {"model.path", "data.train", "data.validation"} and config.model.path == str(found["model.path"])
    assert (Path(config.model.path) / "model.safetensors").read_bytes() == b"weights"
    assert [record.value["prompt"] for record in read_records(config.data.train)] == ["1", "3"]
    assert [record.value["prompt"] for record in read_records(config.data.validation)] == ["5"]
    recorded = yaml.safe_load(to_yaml(with_names(config)))
    assert recorded["model"]["path"] == f"org/name@{model}" and recorded["data"]["train"] == f"org/data@{data}"
    assert recorded["data"]["validation"] == f"org/data@{data}:test"
    assert f"model.path=org/name: commit {model} in {config.model.path}" in capsys.readouterr().out
    assert meeting_seconds(config) == config.run.start_timeout_seconds + config.run.download_timeout_seconds
    typed = [f"{key}={recorded[key.split('.')[0]][key.split('.')[1]]}" for key in found]
    fetch_named(again := sft(tmp_path / "run", *typed))
    assert again == config  # what is recorded can be typed


def test_a_run_keeps_the_commit_that_it_began_with(hub, tmp_path, monkeypatch):
    first = hub.add("org/name", MODEL)
    fetch_named(config := sft(tmp_path / "run", "model.path=org/name"), records=True)
    text = to_yaml(with_names(config))
    (newest := RunDirectory(tmp_path / "run").checkpoints / "policy" / "step_000001").mkdir(parents=True)
    (newest / "aligner.json").write_text("{}")
    (newest / "config.yaml").write_text(text)
    second = hub.add("org/name", {**MODEL, "model.safetensors": b"newer"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another cache"))
    fetch_named(resumed := sft(tmp_path / "run", "model.path=org/name"), records=True)
    assert (Path(resumed.model.path) / "model.safetensors").read_bytes() == b"weights" and Path(resumed.model.path).name == first
    assert fingerprint(to_yaml(with_names(resumed))) == fingerprint(text) != fingerprint(to_yaml(config))
    run = RunDirectory(tmp_path / "run")
    assert check_changes(run, type(resumed), to_yaml(with_names(resumed)), allowed=False) == ""  # the cache may lie elsewhere
    fetch_named(other := sft(tmp_path / "run", f"model.path=org/name@{second}"), records=True)
    with pytest.raises(ConfigError, match=f"model.path: org/name@{first} -> org/name@{second}"):
        check_changes(run, type(other), to_yaml(with_names(other)), allowed=False)
    fetch_named(new := sft(tmp_path / "new", f"model.path=org/name@{second}"), records=True)
    assert Path(new.model.path).name == second and not (tmp_path / "new").exists()  # a commit needs no record


def test_the_first_process_of_a_run_decides_on_the_commit(hub, tmp_path):
    first = hub.add("org/name", MODEL)
    second = hub.add("org/name", {**MODEL, "model.safetensors": b"newer"})
    run = RunDirectory(tmp_path / "run").create()
    run.hub.mkdir()
    (run.hub / "models--org--name@main.json").write_text(json.dumps({"name": "org/name", "commit": first}))
    fetch_named(config := sft(tmp_path / "run", "model.path=org/name"))
    assert Path(config.model.path).name == first
    fetch_named(config := sft(tmp_path / "other", "model.path=org/name"))
    assert Path(config.model.path).name == second and not (tmp_path / "other").exists()  # a look records nothing


def test_plans_need_the_config_alone_and_none_if_the_sizes_are_known(hub, tmp_path):
    hub.add("org/name", MODEL)
    assert Path(load("sft", ["model.path=org/name"]).model.path).is_dir() and not hub.downloads("model.safetensors")
    with pytest.raises(ConfigError, match="^model.path=org/absent: no such directory here"):
        load("sft", ["model.path=org/absent"])
    assert load("sft", ["model=llama3_8b", "model.path=org/absent"]).model.path == "org/absent"


def test_an_argument_of_a_command(hub, tmp_path):
    commit = hub.add("org/name", MODEL)
    assert fetch_one("--from-hf", "org/name").name == commit and fetch_one("--from-hf", str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="^--from-hf=org/absent: "):
        fetch_one("--from-hf", "org/absent")


def test_adapters_name_the_commit_of_their_base(hub, tmp_path, monkeypatch):
    from aligner.models.checkpoint.weights import base_of
    from aligner.models.checkpoint.wrapper import weights_digest
    from aligner.models.config import Architecture, LoraConfig
    from aligner.models.modules.peft import peft_config

    commit = hub.add("org/name", MODEL)
    marker = {"base": f"org/name@{commit}", "base_digest": weights_digest(fetch_one("model.path", "org/name"))}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another cache"))
    assert base_of(marker, tmp_path / "step_000001").is_relative_to(tmp_path / "another cache")  # it is downloaded where it is needed
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "ffn_hidden_size": 8, "vocab_size": 4}
    config = peft_config(Architecture(**sizes), LoraConfig(rank=2), base=marker["base"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", commit)


def test_a_submission_downloads_and_a_script_does_not(hub, tmp_path, monkeypatch):
    """Where the job is submitted; the job itself still gets the names."""
    hub.add("org/name", MODEL)
    submitted: list[str] = []
    monkeypatch.setattr(slurm, "_submit", lambda name, text, *, test_only: submitted.append(text) or 0)
    settings = ["model.path=org/name", "data.train=prompts.jsonl", "cluster.device=cpu", "cluster.gpus_per_node=1"]
    settings.append(f"run.directory={tmp_path / 'run'}")
    assert launch_slurm("sft", settings, LaunchOptions(dry_run=True)) == 0 == launch_slurm("sft", settings, LaunchOptions(test_only=True))
    assert not hub.requests
    assert launch_slurm("sft", settings, LaunchOptions()) == 0
    assert hub.downloads("model.safetensors") == 1 and "model.path=org/name" in submitted[-1] and "snapshots" not in submitted[-1]
    assert not (tmp_path / "run").exists()
