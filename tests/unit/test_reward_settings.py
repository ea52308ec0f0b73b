"""reward.functions: a dict of sections, on the command line and in YAML; and what of RewardConfig does not go together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.errors import ConfigError
from aligner.models.config import ModelConfig
from aligner.rewards.config import NamedRewardConfig, OnError
from aligner.servers.components import RewardConfig
from aligner.settings.command_line import override
from aligner.settings.compose import compose, from_yaml, to_yaml
from aligner.settings.explain import hint
from aligner.settings.schema import schema_keys


@dataclass(kw_only=True, slots=True)
class Scoring:
    """What RewardConfig has of this, which is composed faster."""

    functions: dict[str, NamedRewardConfig] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Root:
    """A program with such a section."""

    reward: Scoring = field(default_factory=Scoring)


YAML = """reward:
  functions:
    one: {path: a:b, weight: 2, arguments: {x: 1}}
    two: {path: a:c}
"""


@pytest.fixture
def parts(tmp_path):
    """`reward.functions` of a program with these overrides, on top of these lines of YAML."""

    def composed(*overrides, text="{}"):
        (tmp_path / "program.yaml").write_text(text)
        config = compose(Root, "program", overrides, folders=[tmp_path])
        assert from_yaml(Root, to_yaml(config)) == config
        return config.reward.functions

    return composed


def test_on_the_command_line(parts):
    assert parts("+reward.functions.maths={path:'a:b',on_error:invalid}", "reward.functions.maths.weight=2") == {
        "maths": NamedRewardConfig(path="a:b", weight=2.0, on_error=OnError.invalid)
    }
    assert parts("reward.functions.far.url=http://c") == {"far": NamedRewardConfig(url="http://c")}
    assert list(parts("reward.functions={p:{served:true},q:{path:a.b}}")) == ["p", "q"]
    real = compose(TrainGRPO, "grpo", ["data.train=x", "model.path=y", "reward.functions.far.url=http://c"])
    assert real.reward.functions == {"far": NamedRewardConfig(url="http://c")}


@pytest.mark.parametrize(
    "given",
    ["reward.function.arguments={target: hello}", "reward.function.arguments.target=hello", "+reward.function.arguments.target=hello"],
)
def test_arguments_of_one_function(given):
    real = compose(TrainGRPO, "grpo", ["data.train=x", "model.path=y", "reward.function.path=a:b", given])
    assert real.reward.function.arguments == {"target": "hello"}
    assert override("reward.function.arguments", {"target": "it's"}) == r"reward.function.arguments={target:'it\'s'}"


def test_in_yaml_and_changed_or_removed_afterwards(parts):
    assert list(parts(text=YAML)) == ["one", "two"]
    settings = ["reward.functions.one.weight=3", "reward.functions.one.arguments.y=2", "~reward.functions.two"]
    assert parts(*settings, text=YAML) == {"one": NamedRewardConfig(path="a:b", weight=3.0, arguments={"x": 1, "y": 2})}
    with pytest.raises(ConfigError, match="unknown setting reward.functions.three.pathh .*did you mean reward.functions.three.path"):
        parts(text=YAML + "    three: {pathh: a:b}\n")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("reward.functions.maths.wieght=2", "unknown setting reward.functions.maths.wieght .*did you mean reward.functions.maths.weight"),
        ("reward.functions.maths={path:'a:b',wieght:2}", "did you mean reward.functions.maths.weight"),
        ("reward.functions.maths={path:'a:b',weight:much}", "reward.functions.maths.weight: .*'much'"),
        ("reward.functions.maths.weight=2", "^reward.functions.maths: no source: a reward requires exactly one of"),
        ("~reward.functions.maths", "there is no reward.functions.maths to remove"),
        ("~reward.functions", "would remove a setting that the schema has"),
    ],
)
def test_refusals(parts, override, text):
    with pytest.raises(ConfigError, match=text):
        parts(override)


def test_the_nearest_key_has_the_users_name():
    keys = list(schema_keys(TrainGRPO))
    assert hint("reward.functions.mine.token_varible", keys) == "did you mean reward.functions.mine.token_variable?"
    assert hint("token_variable", keys) == "did you mean reward.functions.NAME.token_variable?"


def test_what_does_not_go_together():
    one, served = NamedRewardConfig(path="a:b"), NamedRewardConfig(served=True)
    RewardConfig(functions={"one": one}).check_named()
    RewardConfig(functions={"one": one, "judge": served}, serve=True, model=ModelConfig(path="there")).check_named()
    with pytest.raises(ConfigError, match="reward.model.path=''"):
        RewardConfig(functions={"judge": served}, serve=True).check_named()
    with pytest.raises(ConfigError, match="reward.functions.judge.served=true: needs reward.serve=true"):
        RewardConfig(functions={"judge": served})
    with pytest.raises(ConfigError, match=r"reward.serve=true: none of reward.functions \(one\) is the reward model"):
        RewardConfig(functions={"one": one}, serve=True)
    with pytest.raises(ConfigError, match="reward.function.path=c:d and reward.functions.one: give one of the two"):
        RewardConfig(functions={"one": one}, function=NamedRewardConfig(path="c:d"))
    there, function = ModelConfig(path="there"), NamedRewardConfig(path="a:b")
    with pytest.raises(ConfigError, match="reward.function.path='': name a reward function, or set reward.serve=true"):
        RewardConfig(model=there).check_named()
    with pytest.raises(ConfigError, match="reward.model.path='': name the reward model's checkpoint, or a function"):
        RewardConfig(serve=True).check_named()
    for settings in ({"function": function}, {"function": function, "serve": True}, {"model": there, "serve": True}):
        RewardConfig(**settings).check_named()


FUNCTIONS = """def plain(prompts, responses, answers, level): ...
def more(prompts, responses, answers, level, source="x"): ...
def every(prompts, completions, **columns): ...
def texts(prompts, responses, answers): ...
def made(target): return texts
"""


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        (["reward.function.path={}:texts"], set()),
        (["reward.function.path={}:plain"], {"level"}),
        (["reward.function.path={}:texts", "validation.scorer.path={}:more"], {"level", "source"}),
        (["+reward.functions.one.path={}:plain", "+reward.functions.two.path={}:more"], {"level", "source"}),
        (["+reward.functions.one.path={}:plain", "+reward.functions.two.url=http://localhost"], {"level"}),
        (["reward.function.path={}:plain", "validation.scorer.path={}:every"], None),
        (["reward.function.path={}:made", "+reward.function.arguments.target=1"], None),
        (["reward.function.path={}:texts", "environment.path={}:made"], None),
        (["reward.serve=true", "reward.model.path=m"], set()),
    ],
)
def test_the_fields_of_prompts_that_a_run_keeps(settings, columns, tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    given = [setting.format(tmp_path / "functions.py") for setting in settings]
    assert compose(TrainGRPO, "grpo", ["data.train=d.jsonl", *given]).columns() == columns
