"""Every shipped config composes with its schema, and what the root config's own checks say."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from aligner import cli
from aligner.algorithms.annotate import Annotate
from aligner.algorithms.constitution import ConstitutionalAI
from aligner.algorithms.distill import TrainDistillation
from aligner.algorithms.dpo import TrainDPO
from aligner.algorithms.generate import Generate
from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.kto import TrainKTO
from aligner.algorithms.online_distill import TrainOnlineDistillation
from aligner.algorithms.online_dpo import TrainOnlineDPO
from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.process_reward_model import TrainProcessRewardModel
from aligner.algorithms.proposals import WriteProposals
from aligner.algorithms.registry import recipe_of, recipes
from aligner.algorithms.regression_reward_model import TrainRegressionRewardModel
from aligner.algorithms.rejection_sampling import TrainRejectionSampling
from aligner.algorithms.reward_model import TrainRewardModel
from aligner.algorithms.self_rewarding import TrainSelfRewarding
from aligner.algorithms.sft import TrainSFT
from aligner.algorithms.spin import TrainSPIN
from aligner.algorithms.steerlm2 import TrainSteerLM2
from aligner.algorithms.teacher_logprobs import WriteTeacherLogprobs
from aligner.config import _check_numbers, compose, conf_directory, from_yaml, to_yaml
from aligner.errors import ConfigError
from aligner.jobs.local import launch_local
from aligner.jobs.programs import SCRIPTS
from aligner.loop.config import RunConfig
from aligner.models.config import ModelConfig
from aligner.rewards.config import RewardFunctionConfig
from aligner.schema import named_as, schema_keys
from aligner.servers.components import CriticConfig, RewardConfig

CONF = conf_directory()
SCHEMAS = {
    "sft": TrainSFT,
    "steerlm": TrainSFT,
    "reward_model": TrainRewardModel,
    "regression_reward_model": TrainRegressionRewardModel,
    "process_reward_model": TrainProcessRewardModel,
    "dpo": TrainDPO,
    "kto": TrainKTO,
    "grpo": TrainGRPO,
    "ppo": TrainPPO,
    "online_dpo": TrainOnlineDPO,
    "rejection_sampling": TrainRejectionSampling,
    "distill": TrainDistillation,
    "steerlm2": TrainSteerLM2,
    "teacher_logprobs": WriteTeacherLogprobs,
    "generate": Generate,
    "annotate": Annotate,
    "constitution": ConstitutionalAI,
    "proposals": WriteProposals,
    "online_distill": TrainOnlineDistillation,
    "spin": TrainSPIN,
    "self_rewarding": TrainSelfRewarding,
}
GIVEN = ["data.train=prompts.jsonl"]
ROOT_FILES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem in SCHEMAS)
JOB_FILES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in SCHEMAS)  # a recipe for a model and a cluster: ppo_70b
GROUP_FILES = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))


def test_there_is_a_schema_and_a_script_for_every_recipe() -> None:
    assert set(ROOT_FILES) == set(SCHEMAS) == set(recipes())
    for name, recipe in recipes().items():
        assert recipe.config is SCHEMAS[name]
        assert (SCRIPTS / recipe.script).is_file()


@pytest.mark.parametrize("name", ROOT_FILES)
def test_root_files_compose_and_round_trip(name: str) -> None:
    config = compose(SCHEMAS[name], name, GIVEN)
    assert type(config) is SCHEMAS[name]
    assert config.run.directory == f"runs/{name}"  # no two recipes share a directory by default
    assert from_yaml(SCHEMAS[name], to_yaml(config)) == config


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_files_compose_and_round_trip(name: str) -> None:
    """They begin with the name of their recipe, or its short form."""
    recipe = recipe_of(name).name
    assert name.startswith((f"{recipe}_", "rm_"))
    config = compose(SCHEMAS[recipe], name, GIVEN)
    assert config.run.directory == f"runs/{name}"
    assert config.num_processes % config.parallel.replica_size == 0
    assert from_yaml(SCHEMAS[recipe], to_yaml(config)) == config


@pytest.mark.parametrize("name", GROUP_FILES)
def test_group_files_compose(name: str) -> None:
    """A file of a group belongs to the recipes that it names, else to those with a section that has its settings; the section is the same
    in all of them: one is enough."""
    group, stem = name.split("/")
    settings = (yaml.safe_load((CONF / f"{name}.yaml").read_text()) or {}).keys() - {"defaults"}
    sections = {recipe: get_type_hints(schema).get(group) for recipe, schema in SCHEMAS.items()}
    knowing = [recipe for recipe, kind in sections.items() if kind and settings <= {field.name for field in fields(kind)}]
    recipes = named_in(name) or knowing
    assert recipes, f"conf/{name}.yaml belongs to no recipe"
    assert group == "experiment" or set(recipes) <= set(knowing)
    for recipe in recipes[:1]:
        config = compose(SCHEMAS[recipe], recipe, [*GIVEN, choice(recipe, name)])
        written = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        section = config if group == "experiment" else getattr(config, group)
        for key, value, got in leaves({k: v for k, v in written.items() if k != "defaults"}, section):
            assert got == value, f"conf/{name}.yaml: {key}"


def named_in(name: str) -> list[str]:
    """The recipes that a file of a group says it is for."""
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    return [recipe for line in lines if line.startswith("# Recipes: ") for recipe in line.removeprefix("# Recipes: ").split(", ")]


def choice(recipe: str, name: str) -> str:
    """The argument that chooses the file of a group."""
    group, stem = name.split("/")
    chosen = yaml.safe_load((CONF / f"{recipe}.yaml").read_text())["defaults"]
    return f"{group}={stem}" if any(isinstance(entry, dict) and group in entry for entry in chosen) else f"+{group}={stem}"


@pytest.mark.parametrize("name", [name for name in GROUP_FILES if name.startswith(("algorithm/", "experiment/"))])
def test_a_preset_is_refused_by_every_other_recipe(name: str) -> None:
    """Some set nothing, or what several recipes have: without a word a run of one would get another's name, or its settings."""
    own = named_in(name)
    assert own and set(own) <= set(SCHEMAS)
    message = f"{name.replace('/', '=')}: a preset of {', '.join(own)}, given to"
    for recipe in SCHEMAS.keys() - set(own):
        with pytest.raises(ConfigError, match=f"^{message} {recipe}; allowed: "):
            compose(SCHEMAS[recipe], recipe, [*GIVEN, choice(recipe, name)])


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
    for key, value, default in leaves(yaml.safe_load((CONF / f"{name}.yaml").read_text()), SCHEMAS[name]()):
        assert value != default, f"conf/{name}.yaml repeats the default of {key}"


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_data_is_required(schema: type) -> None:
    name = next(key for key, value in SCHEMAS.items() if value is schema)
    with pytest.raises(ConfigError, match="data.train is required: give data.train=..."):
        compose(schema, name)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RunConfig(directory=""), "run.directory='': name a directory"),
        (lambda: RunConfig(start_timeout_seconds=0), "run.start_timeout_seconds=0: must be above 0"),
        (lambda: CriticConfig(mini_batch_size=0), "critic.mini_batch_size=0: must be at least 1"),
        (lambda: CriticConfig(clip=-0.1), "critic.clip=-0.1: must not be negative (0 is off)"),
        (lambda: RewardConfig(num_processes=0), "reward.num_processes=0: must be at least 1"),
    ],
)
def test_bad_values(make, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize("schema", list(dict.fromkeys(SCHEMAS.values())))
def test_every_number_must_be_finite(schema: type) -> None:
    keys = list(schema_keys(schema))
    numbers = [key for key in keys if "float" in key.type]
    assert len(numbers) > 20
    for key in numbers:
        name = named_as(key.key, "")
        value = [math.nan] if "list" in key.type else {"x": math.nan} if "dict" in key.type else math.nan
        for part in reversed(name.split(".")):
            value = {part: value}
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}(\.0|\.x)?=nan: must be a finite number$"):
            _check_numbers(value, keys)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("optimizer.lr=1e30", "optimizer.lr=1e+30, min_lr=0.0: need 0 <= min_lr <= lr and 0 < lr <= 10"),
        ("critic.optimizer.lr=1e30", "critic.optimizer.lr=1e+30, min_lr=0.0: need 0 <= min_lr"),
        ("critic.optimizer.beta1=1", "critic.optimizer.beta1=1.0: must be at least 0 and below 1"),
        ("optimizer.beta2=-0.1", "optimizer.beta2=-0.1: must be at least 0 and below 1"),
        ("optimizer.eps=0", "optimizer.eps=0.0: must be above 0"),
        ("optimizer.weight_decay=2e6", "optimizer.weight_decay=2000000.0: must not be negative, and lr * weight_decay must be below 1"),
        (f"run.seed={2**63}", f"run.seed={2**63}: must be"),
        ("run.seed=-1", "run.seed=-1: must be from 0 to 9223372036854775807"),
        ("model.architecture.rope_theta=0", "model.architecture.rope_theta=0.0: must be finite and above 0"),
        ("model.architecture.norm_eps=-1", "model.architecture.norm_eps=-1.0: must be finite and not negative"),
        ("reward.functions.a.url=http://x reward.functions.a.num_threads=0", "reward.functions.a.num_threads=0: must be at least 1"),
        ("rollout.sampling.top_p=2", "rollout.sampling.top_p=2.0: must be above 0 and at most 1"),
    ],
)
def test_numbers_that_cannot_work_are_named_as_they_are_written(setting: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        from_yaml(TrainPPO, "", ["optimizer.min_lr=0", "critic.optimizer.min_lr=0", "data.train=x", *setting.split()])


def test_a_reward_must_be_named() -> None:
    with pytest.raises(ConfigError, match="reward.function.path='': name a reward function, or set reward.serve=true"):
        RewardConfig(model=ModelConfig(path="a model that is not served")).check_named()
    with pytest.raises(ConfigError, match="reward.model.path='': name the reward model's checkpoint, or a function"):
        RewardConfig(serve=True).check_named()
    RewardConfig(function=RewardFunctionConfig(path="a:b")).check_named()
    RewardConfig(serve=True, function=RewardFunctionConfig(path="a:b")).check_named()
    RewardConfig(serve=True, model=ModelConfig(path="there")).check_named()


@pytest.mark.parametrize(
    ("recipe", "settings", "text"),
    [
        ("dpoo", [], "config 'dpoo': its name must begin with one of annotate, constitution"),
        ("grpo", ["parallel.tp=3", "num_processes=2"], "parallel.tp=3 does not divide the 2 ranks"),
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
