"""Every shipped config composes with its schema, and what the root config's own checks say."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from aligner import cli
from aligner.algorithms.registry import composed, recipe_of, recipes
from aligner.commands.programs import launch_local
from aligner.errors import ConfigError
from aligner.files import conf_directory, configs
from aligner.settings.compose import compose, from_yaml, to_yaml
from aligner.settings.explain import check_preset

CONF = conf_directory()
SCHEMAS = {name: recipe.config for name, recipe in recipes().items()}
GIVEN = ["data.train=prompts.jsonl"]
ROOT_FILES = [name for name in configs() if name in SCHEMAS]
JOB_FILES = [name for name in configs() if name not in SCHEMAS]  # a recipe for a model and a cluster: ppo_70b
PRESETS = sorted(path.relative_to(CONF) for path in CONF.glob("*/*/*.yaml"))  # of one recipe: dpo/algorithm/simpo.yaml
SHARED = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml") if path.parent.name not in SCHEMAS)  # model/llama3_8b.yaml


def test_there_is_a_schema_for_every_recipe() -> None:
    assert set(ROOT_FILES) == set(SCHEMAS) == set(recipes())
    for recipe in recipes().values():
        assert recipe.folders()[0].is_dir()


@pytest.mark.parametrize("name", [*ROOT_FILES, *JOB_FILES])
def test_files_compose_and_round_trip(name: str) -> None:
    """Configs for a model and a cluster begin with the name of their recipe, or its short form."""
    recipe = recipe_of(name).name
    assert name == recipe or (name.startswith((f"{recipe}_", "rm_")) and (CONF / recipe / f"{name}.yaml").is_file())
    config = compose(SCHEMAS[recipe], name, GIVEN)
    assert type(config) is SCHEMAS[recipe]
    assert config.run.directory == f"runs/{name}"  # no two recipes share a directory by default
    assert config.num_processes % config.parallel.replica_size == 0
    assert from_yaml(SCHEMAS[recipe], to_yaml(config)) == config


def takers(file: Path) -> list[str]:
    """The recipes that take a preset: those that search its folder, and have its section."""
    group = file.parent.name
    found = [name for name, recipe in recipes().items() if CONF / file.parent.parent in recipe.folders()]
    return [name for name in found if group == "experiment" or group in get_type_hints(SCHEMAS[name])]


@pytest.mark.parametrize("file", [*PRESETS, *SHARED], ids=str)
def test_presets_compose(file: Path) -> None:
    """A section is the same in all recipes that have it: one is enough."""
    group, written = file.parent.name, yaml.safe_load((CONF / file).read_text())
    own = takers(file)
    assert own, f"conf/{file} belongs to no recipe"
    for recipe in own[:1]:
        config = composed(recipe, [*GIVEN, choice(recipe, file)])
        section = config if group == "experiment" else getattr(config, group)
        for key, value, got in leaves({k: v for k, v in written.items() if k != "defaults"}, section):
            is_given = group == "experiment" and any(text.startswith(f"{key.lstrip('.')}=") for text in GIVEN)
            assert is_given or got == value, f"conf/{file}: {key}"


def test_pair_losses_are_presets_of_every_recipe_with_one() -> None:
    assert takers(Path("dpo/algorithm/simpo.yaml")) == ["dpo", "online_dpo", "self_rewarding", "spin"]


def choice(recipe: str, file: Path) -> str:
    """The argument that chooses a preset."""
    chosen = yaml.safe_load((CONF / recipe / f"{recipe}.yaml").read_text())["defaults"]
    is_there = any(isinstance(entry, dict) and file.parent.name in entry for entry in chosen)
    return f"{'' if is_there else '+'}{file.parent.name}={file.stem}"


@pytest.mark.parametrize("file", PRESETS, ids=str)
def test_a_preset_is_refused_by_every_other_recipe(file: Path) -> None:
    """Otherwise a run would get the name or the settings of another recipe's preset. Composition asks the same check."""
    namesakes = {name for other in PRESETS if other.parts[1:] == file.parts[1:] for name in takers(other)}
    for recipe in sorted(SCHEMAS.keys() - namesakes):
        refused = rf"^{file.parent.name}={file.stem}: a preset of .*\b{file.parts[0]}\b.*, given to {recipe}; allowed: "
        with pytest.raises(ConfigError, match=refused):
            check_preset(recipe, f"{file.parent.name}/{file.stem}", recipes()[recipe].folders())


@pytest.mark.parametrize("command", ["plan", "launch local", "launch slurm --dry-run", "data validate", "gap"])
def test_commands_refuse_a_preset_of_another_recipe(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "grpo", "algorithm=kto", *GIVEN]) == 2
    assert "algorithm=kto: a preset of kto, given to grpo; allowed: cispo, dapo, " in capsys.readouterr().err


def leaves(node: object, schema: object, prefix: str = "") -> list[tuple[str, object, object]]:
    """(key, value in a YAML file, default of the schema) of every setting in it."""
    if not isinstance(node, dict) or not is_dataclass(schema):
        return [(prefix, node, schema)]
    return [leaf for key, value in node.items() if key != "defaults" for leaf in leaves(value, getattr(schema, key), f"{prefix}.{key}")]


@pytest.mark.parametrize("name", ROOT_FILES)
def test_root_files_hold_deviations_only(name: str) -> None:
    """A default that is written twice is wrong in one place sooner or later."""
    for key, value, default in leaves(yaml.safe_load((CONF / name / f"{name}.yaml").read_text()), SCHEMAS[name]()):
        assert value != default, f"conf/{name}.yaml repeats the default of {key}"


@pytest.mark.parametrize(
    ("recipe", "settings", "text"),
    [
        ("ppo", ["critic.parallel.tp=2"], "parallel.tp=2 does not divide the 1 ranks"),
        ("ppo", [], "reward.model.path=''"),
        ("grpo", [], "reward.function.path=''"),
        ("sft", ["parallel.tp=2"], "parallel.tp=2 does not divide the 1 ranks"),
    ],
)
def test_the_local_launcher_refuses_before_it_starts_anything(recipe: str, settings: list[str], text: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with pytest.raises(ConfigError) as caught:
        launch_local(recipe, [*GIVEN, f"run.directory={directory}", *settings])
    assert text in str(caught.value)
    assert not directory.exists()
