"""Settings that had another name once: what an error says of one, and reading a run that was written with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.registry import recipes
from aligner.algorithms.sft import TrainSFT
from aligner.cluster.run_directory import POLICY, RunDirectory
from aligner.config import compose, from_yaml, schema_of, to_yaml
from aligner.errors import ConfigError
from aligner.former_names import NAMES, VALUES, present_name, translated
from aligner.loop.session import check_changes
from aligner.models import checkpoint_files as files
from aligner.schema import is_known, schema_keys

KEYS = list(schema_keys(TrainGRPO))

NOW = [
    *("data.train=a.jsonl", "model.path=m", "num_processes=2", "validation.scorer.path=f.py:right", "validation.pass_threshold=0.75"),
    *("reward.functions.form={path: a:b, weight: 2, arguments: {function: kept}}", "reward.functions.maths={path: a:c}"),
    *("environment.path=e.py:E", "server_client.num_threads=7", "local_launcher.grace_seconds=3", "algorithm.advantage_estimator=rloo"),
    *("algorithm.tau_pos=2", "algorithm.tau_neg=3", "algorithm.correction.kind=icepop"),
    *("model.layers=torch", "reward.model.layers=transformer_engine"),
]


def as_it_was(config: object) -> str:
    """The YAML of the config as it was written under the former names."""
    saved = yaml.safe_load(to_yaml(config))
    saved["client"], saved["launcher"] = saved.pop("server_client"), saved.pop("local_launcher")
    saved["validation"]["correct_from"] = saved["validation"].pop("pass_threshold")
    saved["accuracy"] = saved["validation"].pop("scorer")
    for section in (saved["accuracy"], saved["environment"], saved["reward"]["function"], *saved["reward"]["functions"].values()):
        section["function"] = section.pop("path")
    algorithm = saved["algorithm"]
    algorithm["estimator"] = algorithm.pop("advantage_estimator")
    algorithm["gate_positive"], algorithm["gate_negative"] = algorithm.pop("tau_pos"), algorithm.pop("tau_neg")
    for model in (saved["model"], saved["reward"]["model"]):
        model["transformer_engine"] = model.pop("layers") == "transformer_engine"
    kind = algorithm["correction"]["kind"]
    algorithm["correction"]["kind"] = {"tis": "truncate", "icepop": "band", "mis": "mask"}.get(kind, kind)
    return yaml.safe_dump(saved)


def checkpoint_of(directory: RunDirectory, text: str) -> None:
    """A complete checkpoint as far as the check of settings looks at it."""
    step = files.step_directory(directory.create().checkpoints / POLICY, 3)
    writing = files.new_writing_directory(step)
    (writing / "config.yaml").write_text(text)
    (writing / files.MANIFEST).write_text("{}\n")
    files.write_marker(writing, {"step": 3})
    files.publish(writing, step)


def test_every_present_name_is_a_setting_and_no_former_one_is():
    known = [key for recipe in recipes().values() for key in schema_keys(recipe.config)]
    for former, present in NAMES.items():
        assert is_known(present.replace("*", "mine"), known) and not is_known(former.replace("*", "mine"), known), former
    for key, values in VALUES.items():
        (kind,) = {one.type for one in known if one.key == key}
        assert set(values.values()) <= set(kind.split("|")) and not set(values) & set(kind.split("|"))


def test_names():
    assert present_name("accuracy.function", KEYS) == "validation.scorer.path"
    assert present_name("accuracy.arguments.target", KEYS) == "validation.scorer.arguments.target"
    assert present_name("reward.functions.mine.function", KEYS) == "reward.functions.mine.path"
    assert present_name("client", KEYS) == "server_client"
    for key in ("reward.function", "reward.functions.mine.weight", "clients.x", "client.nothing", "model.path"):
        assert present_name(key, KEYS) == key
    assert present_name("client.num_threads", list(schema_keys(TrainSFT))) == "client.num_threads"  # SFT has no servers


def test_a_former_name_is_refused_with_the_present_one():
    for old in ("truncate", "band", "mask"):
        with pytest.raises(ConfigError, match=f"algorithm.correction.kind: {old} is called {VALUES['algorithm.correction.kind'][old]} now"):
            compose(TrainGRPO, "grpo", [f"algorithm.correction.kind={old}"])
    given = {
        "reward.function.function=a:b": "reward.function.path",
        "+reward.functions.mine.function=a:b": "reward.functions.mine.path",
        "accuracy.function=a:b": "validation.scorer.path",
        "client.num_threads=2": "server_client.num_threads",
        "launcher.grace_seconds=2": "local_launcher.grace_seconds",
        "environment.function=a:b": "environment.path",
        "algorithm.estimator=rloo": "algorithm.advantage_estimator",
        "algorithm.gate_positive=2": "algorithm.tau_pos",
        "algorithm.gate_negative=2": "algorithm.tau_neg",
        "validation.correct_from=1": "validation.pass_threshold",
        "model.transformer_engine=true": "model.layers",
    }
    with pytest.raises(ConfigError) as raised:
        compose(TrainGRPO, "grpo", list(given))
    for setting, present in given.items():
        assert f"in {setting!r}: it is called {present} now" in str(raised.value)


def test_a_preset_with_a_former_name_is_refused(tmp_path: Path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "grpo.yaml").write_text("defaults:\n  - algorithm: mine\n  - _self_\n")
    (tmp_path / "algorithm" / "mine.yaml").write_text("estimator: rloo\n")
    with pytest.raises(ConfigError, match=r"algorithm.estimator in .*: it is called algorithm.advantage_estimator now"):
        compose(TrainGRPO, "grpo", folders=[tmp_path])


def test_a_saved_config_of_before_is_the_same_config():
    config = from_yaml(TrainGRPO, "", NOW)
    before = as_it_was(config)
    assert "estimator: rloo" in before and "gate_negative: 3" in before and "kind: band" in before
    assert "transformer_engine: true" in before and "transformer_engine: false" in before and "\n  layers:" not in before
    assert from_yaml(TrainGRPO, before) == config
    schemas = [recipe.config for recipe in recipes().values()]
    assert schema_of(schemas, before) is schema_of(schemas, to_yaml(config)) is TrainGRPO
    assert from_yaml(TrainGRPO, before, ["server_client.num_threads=8"]).server_client.num_threads == 8
    assert from_yaml(TrainGRPO, before).reward.functions["form"].arguments == {"function": "kept"}  # the user's own names stay
    with pytest.raises(ConfigError, match="it is called server_client.num_threads now"):
        from_yaml(TrainGRPO, before, ["client.num_threads=8"])


def test_translating_leaves_the_rest_alone():
    tree = {"accuracy": {"function": "", "arguments": {}}, "nobody": {"knows": [1]}, "num_processes": 2, "validation": {"k": []}}
    assert translated(tree, KEYS) == {
        "validation": {"scorer": {"path": "", "arguments": {}}, "k": []},
        "nobody": {"knows": [1]},
        "num_processes": 2,
    }


@pytest.mark.parametrize("schema", [TrainGRPO, TrainPPO])
def test_a_run_of_before_is_resumed(tmp_path: Path, schema: type):
    settings = [setting for setting in NOW if schema is TrainGRPO or "advantage_estimator" not in setting]
    config = from_yaml(schema, "", settings)
    before = as_it_was(config) if schema is TrainGRPO else to_yaml(config).replace("tau_pos", "gate_positive").replace("icepop", "band")
    directory = RunDirectory(tmp_path / "run")
    checkpoint_of(directory, before)
    assert check_changes(directory, schema, to_yaml(config), allowed=False) == ""
    other = from_yaml(schema, "", [*settings, "algorithm.tau_pos=5"])
    with pytest.raises(ConfigError, match="algorithm.tau_pos: 2.0 -> 5.0"):
        check_changes(directory, schema, to_yaml(other), allowed=False)
