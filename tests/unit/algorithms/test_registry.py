"""Recipes are found by their modules, and by entry points of other packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aligner.algorithms import registry, sft
from aligner.errors import ConfigError
from aligner.run.settings import TrainerRun, Traits, WritingRun


@pytest.fixture
def others(monkeypatch):
    """`others(name="module:object")`: what other packages name."""

    def name(**entries: str) -> None:
        points = [EntryPoint(name=key, value=value, group=registry.GROUP) for key, value in entries.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
        registry.recipes.cache_clear()

    yield name
    registry.recipes.cache_clear()


def test_every_module_with_a_recipe_is_one() -> None:
    found = registry.recipes()
    files = {path.stem for path in Path(sft.__file__).parent.glob("*.py") if "\nRECIPE = " in path.read_text()}
    assert set(found) == files and len(found) >= 21
    assert all(recipe.columns and name == recipe.name for name, recipe in found.items())


TRAIN = [name for name, recipe in registry.recipes().items() if not issubclass(recipe.config, WritingRun)]


@pytest.mark.parametrize("name", TRAIN)
def test_a_validation_on_nothing_is_refused(name: str) -> None:
    config = registry.composed(name, ["data.train=d.jsonl", "loop.validate_every=3"])
    with pytest.raises(ConfigError, match="loop.validate_every=3: there is nothing to validate on; allowed: data.validation, or"):
        config.check_complete()
    config.loop.validate_every, config.loop.validate_first = 0, True
    with pytest.raises(ConfigError, match="loop.validate_first=true: there is nothing to validate on; allowed: data.validation, or"):
        config.check_complete()
    config.data.validation = "d.jsonl"
    try:
        config.check_complete()
    except ConfigError as error:
        assert "reward" in str(error)  # is missing too


def test_recipes_of_other_packages(others, monkeypatch) -> None:
    monkeypatch.setattr(sft, "OTHER", replace(sft.RECIPE, name="focal"), raising=False)
    others(focal="aligner.algorithms.sft:OTHER")
    assert registry.recipe_of("focal").config is sft.TrainSFT


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nothing.like.it:RECIPE", "entry point aligner.recipes: x = nothing.like.it:RECIPE: ModuleNotFoundError"),
        ("aligner.algorithms.sft:SFT", "is a ABCMeta, expected an aligner.run.recipe.Recipe"),
        ("aligner.algorithms.sft:RECIPE", "there is a recipe sft already"),
    ],
)
def test_bad_entry_points(others, value: str, said: str) -> None:
    others(x=value)
    with pytest.raises(ConfigError, match=said):
        registry.recipes()


def test_a_config_is_of_the_recipe_in_whose_folder_it_lies() -> None:
    assert [registry.recipe_of(name).name for name in ("steerlm2", "steerlm_70b", "rm_70b", "online_dpo_70b")] == [
        "steerlm2",
        "steerlm",
        "reward_model",
        "online_dpo",
    ]


def test_a_recipe_that_lacks_a_method_is_refused_where_it_is_defined() -> None:
    @dataclass(kw_only=True, slots=True)
    class Unread(TrainerRun):
        def traits(self) -> Traits:
            return self.batch_traits(rows=1)

    with pytest.raises(TypeError, match=r"recipe unread: Unread has no method read \(see aligner.run.settings.JobRun\)"):
        replace(sft.RECIPE, name="unread", config=Unread)
    with pytest.raises(TypeError, match="Unread.*abstract method '?read"):
        Unread()


def test_a_config_of_ones_own_is_of_the_recipe_that_it_builds_on(tmp_path) -> None:
    files = {"mine": "[middle, _self_]", "middle": "[grpo_70b, override cluster: dgx_h200, _self_]", "none": "[_self_]", "round": "[round]"}
    for name, defaults in files.items():
        (tmp_path / f"{name}.yaml").write_text(f"# What {name} is for.\ndefaults: {defaults}\n")
    where = [f"hydra.searchpath=[file://{tmp_path}]"]
    assert registry.recipe_of("mine", where).name == "grpo"
    assert registry.config_file("mine", where) == tmp_path / "mine.yaml"
    assert (
        registry.composed("mine", [*where, "data.train=x"]).num_processes == registry.composed("grpo_70b", ["data.train=x"]).num_processes
    )
    for name in ("none", "round"):
        with pytest.raises(ConfigError, match=f"^config '{name}' builds on no recipe: begin its `defaults` with the name of one"):
            registry.recipe_of(name, where)
    with pytest.raises(ConfigError, match=r"^there is no config 'mine': did you mean .*\?|^there is no config 'mine': there are "):
        registry.recipe_of("mine")


def test_a_recipe_of_the_package_is_found_without_the_others() -> None:
    program = (
        "import sys; from aligner.algorithms.registry import recipe_of; print(recipe_of('grpo_70b').name);"
        "print(*sorted(name for name in sys.modules if name.startswith('aligner.algorithms.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["grpo", "aligner.algorithms.grpo", "aligner.algorithms.registry"]
