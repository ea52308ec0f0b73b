"""What the studio's form makes of its fields: overrides, a command line, a run's directory; and the pairs of its chat."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytest.importorskip("nicegui")

from aligner.algorithms.registry import composed
from aligner.errors import ConfigError, ServerError
from aligner.settings.explain import shipped
from aligner.settings.schema import SchemaKey
from aligner.studio import form
from aligner.studio.served import PREFERENCES, preference, record


def key_of(name: str, config: str = "sft") -> SchemaKey:
    return next(key for key in shipped()[config][1] if key.key == name)


def settings_of(typed: dict[str, str], directory: Path, **presets: str) -> list[str]:
    _, keys, values = shipped()["sft"]
    return form.overrides_of(keys, values, presets, typed, directory)


def test_only_what_differs_becomes_an_override(tmp_path: Path) -> None:
    usual = {"optimizer.lr": "1.0e-05", "model.path": "", "data.train": "", "loop.max_steps": ""}  # a number without digits is no number
    assert settings_of(usual, tmp_path / "run") == [f"run.directory={tmp_path / 'run'}"]
    changed = settings_of({"optimizer.lr": "1e-4", "loop.max_steps": "7"}, tmp_path / "run", model="tiny", cluster="")
    assert changed[0] == "model=tiny"
    assert sorted(changed[1:]) == ["loop.max_steps=7", "optimizer.lr=1e-4", f"run.directory={tmp_path / 'run'}"]


@pytest.mark.parametrize(
    "text",
    ["plain/path-1.jsonl", "with space", "it's", "a=b,c", "null", "back\\slash", "end\\", "\\'", "TRUE", "(x)", "日本", "$(touch x); 'y'"],
)
def test_a_text_reaches_the_config_as_it_was_typed(text: str, tmp_path: Path) -> None:
    settings = settings_of({"data.train": text, "logging.wandb_project": text}, tmp_path / "a b")
    command = shlex.split(shlex.join(form.command_of("local", "sft", settings)))
    assert command[:4] == ["aligner", "launch", "local", "sft"]
    config = composed("sft", command[4:])
    assert config.data.train == text
    assert config.logging.wandb_project == text
    assert config.run.directory == str(tmp_path / "a b")


def test_a_list_of_sources_is_typed_as_on_the_command_line() -> None:
    assert form.override_of(key_of("data.train"), "[{path: a.jsonl, weight: 2}]") == "data.train=[{path: a.jsonl, weight: 2}]"
    assert form.override_of(key_of("model.lora.targets"), "[qkv]") == "model.lora.targets=[qkv]"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../..", "/etc", "a b", "a\n", "-x/../../y", "link", "link/x", "run/inner"])
def test_a_directory_outside_the_folder_or_inside_a_run_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "run.json").write_text("{}")
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="name="):
        form.directory_of(folder, name)


def test_directories_below_the_folder(tmp_path: Path) -> None:
    assert form.directory_of(tmp_path, "a/b.c-1") == tmp_path / "a" / "b.c-1"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    assert form.directory_of(tmp_path, "old") == tmp_path / "old"  # resumed
    assert form.free_name(tmp_path, "sft") == "sft"
    assert form.free_name(tmp_path, "old") == "old_2"


def test_fields_have_the_choices_of_their_types() -> None:
    assert form.choices(key_of("model.recompute")) == ["none", "selective", "full"]
    assert form.choices(key_of("data.apply_chat_template")) == ["true", "false"]
    assert form.choices(key_of("optimizer.lr")) == []
    assert form.choices(key_of("model.lora.targets")) == []


def test_sections_and_the_search() -> None:
    keys = shipped()["grpo"][1]
    assert form.shown(keys, form.IMPORTANT, "")[0].key == "data.train"
    assert [key.key for key in form.shown(keys, "num_processes", "")] == ["num_processes"]
    lora = [key.key for key in form.shown(keys, "model", "")]
    assert "model.lora.rank" in lora
    assert all(name.startswith("model.") for name in lora)
    assert "optimizer.lr" in [key.key for key in form.shown(keys, "model", "learning rate warm-up")]
    assert not [
        key for section in ("run", "reward") for key in form.shown(keys, section, "") if "*" in key.key or key.key == "run.directory"
    ]


def test_the_setting_that_an_error_names() -> None:
    keys = shipped()["sft"][1]
    assert form.named_in("optimizer.lr=-1.0, min_lr=1e-06: need 0 <= min_lr", keys) == "optimizer.lr"
    assert form.named_in("data.train is required: give data.train=...", keys) == "data.train"
    assert form.named_in("no such thing", keys) == ""


def test_a_read_only_studio_starts_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--read-only"):
        form.start("local", "sft", [], tmp_path / "run", read_only=True)
    with pytest.raises(ServerError, match="--read-only"):
        record(tmp_path, {}, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_pairs(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    pair = preference(turns, "good", "bad", is_chat=True)
    assert pair["prompt"] == turns
    assert pair["chosen"] == [{"role": "assistant", "content": "good"}]
    assert preference([{"role": "user", "content": "Once "}], "upon", "over", is_chat=False) == {
        "prompt": "Once ",
        "chosen": "upon",
        "rejected": "over",
    }
    for worse in ("good", " \n"):
        with pytest.raises(ServerError, match="differ"):
            preference(turns, "good", worse, is_chat=True)
    record(tmp_path, pair, read_only=False)
    record(tmp_path, pair, read_only=False)
    assert len((tmp_path / PREFERENCES).read_text().splitlines()) == 2
