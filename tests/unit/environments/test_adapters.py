"""Environments of Gymnasium: what an action is, what is shown, and settings that do not fit. The settings of the other kinds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium import spaces

from aligner.algorithms.registry import composed
from aligner.commands import validate_data
from aligner.commands.validate_data import tasks
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.environments.environment import Environment, Turn
from aligner.environments.kinds import build_environment
from aligner.errors import ConfigError
from aligner.types import Prompt


class Parrot(gymnasium.Env):
    """Texts in, texts out. The first one depends on the seed."""

    action_space = spaces.Text(8, charset="abc ")
    observation_space = spaces.Text(64)

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said = []
        return f"say {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.said.append(action)
        return "|".join(self.said), float(len(action)), action == "c", len(self.said) == self.limit, {}


class Steers(Parrot):
    action_space = spaces.Box(0, 1)


def kind(chosen: str, **settings) -> EnvironmentConfig:
    return EnvironmentConfig(kind=EnvironmentKind(chosen), **settings)


def environment(name: str, **settings) -> Environment:
    return build_environment(kind("gymnasium", name=name, **settings))


def prompt(seed: int | None = None, number: int = 0) -> Prompt:
    return Prompt(id=number, tokens=(1,), source="d.jsonl:1", columns={} if seed is None else {"seed": seed})


def turn(text: str, number: int = 1, *, is_last: bool = False) -> Turn:
    return Turn(text=text, tokens=(1,), number=number, is_last=is_last)


def test_texts_and_a_class_that_is_not_registered(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    made = environment("test_adapters:Parrot", arguments={"limit": 2})
    first, same, other = (next(iter(made.tasks(1, seed)))["prompt"] for seed in (3, 3, 4))
    assert first == same != other and first.startswith("say ")
    state = made.reset(prompt(3))
    said = made.step(state, turn(" ab\n"))
    assert (said.text, said.reward, said.done) == ("ab", 2.0, False)
    refused = made.step(state, turn("xyz", 2))
    assert refused.text.startswith("Not an action: write a text in Text(") and refused.counts == {"invalid_actions": 1.0}
    cut = made.step(state, turn("b", 3))
    assert cut.done and cut.reward == 1.0 and cut.counts == {"env_truncated": 1.0}
    assert made.step(made.reset(prompt(3)), turn("c")).done


def test_the_last_action_that_a_turn_names_counts() -> None:
    made = environment("FrozenLake-v1", actions=["left", "down", "right", "up"], arguments={"is_slippery": False, "render_mode": "ansi"})
    for text, place in (("I could go left. No: RIGHT!", 1), ("upright, so down", 4), ("go right", 1), ("right-hand left-over", 0)):
        state = made.reset(prompt())
        assert "\x1b[41m" in made.step(state, turn(text)).text  # what it draws
        assert state.unwrapped.s == place, text
    refused = made.step(made.reset(prompt()), turn("upright"))
    assert refused.text == "Not an action: write one of left, down, right, up."


def test_numbers_are_actions_by_default_and_the_reward_is_the_environments() -> None:
    made = environment("FrozenLake-v1", arguments={"is_slippery": False, "desc": ["SG"]})
    won = made.step(made.reset(prompt()), turn("12 or 2"))
    assert (won.reward, won.done, won.text) == (1.0, True, "")
    assert next(iter(made.tasks(1, 0))) == {"prompt": "0\nAction: one of 0, 1, 2, 3.", "seed": 0}


def test_the_seed_of_an_episode_is_its_prompts() -> None:
    """The field `seed`, else the prompt's place in the data."""
    made = environment("Blackjack-v1")
    shown = {seed: next(iter(made.tasks(1, seed)))["prompt"] for seed in range(8)}
    assert len(set(shown.values())) > 3
    for seed in range(8):
        hit = {made.step(made.reset(one), turn("1")).text for one in (prompt(seed), prompt(seed, 5), prompt(None, seed))}
        assert len(hit) == 1


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (dict(name="NoSuch-v7"), r"environment\.name=NoSuch-v7: cannot be made from .*NoSuch"),
        (dict(name="FrozenLake-v1", arguments={"colour": 1}), r"environment\.name=FrozenLake-v1: cannot be made from \{'colour': 1\}"),
        (dict(name="FrozenLake-v1", actions=["a", "b"]), r"environment\.actions=\['a', 'b'\]: FrozenLake-v1 has 4 actions"),
        (dict(name="FrozenLake-v1", actions=["a", "A", "b", "c"]), "as many different names"),
        (dict(name="test_adapters:Steers"), r"its actions are Box.*allowed: a Text or a Discrete space"),
        (dict(name="test_adapters:Parrot", actions=["a"]), "the actions of test_adapters:Parrot are texts; allowed: none"),
    ],
)
def test_environments_that_cannot_be_had(monkeypatch, config: dict, complaint: str) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(ConfigError, match=complaint):
        environment(**config)


@pytest.mark.parametrize(
    ("chosen", "given", "complaint"),
    [
        ("gymnasium", {}, "environment.name='': kind=gymnasium needs it"),
        ("reasoning_gym", {}, "environment.name='': kind=reasoning_gym needs it"),
        ("openenv", {}, "environment.server='': kind=openenv needs it"),
        ("python", {}, "environment.path='': kind=python needs it"),
        ("verifiers", {"name": "x"}, "environment.python='': kind=verifiers needs it"),
        ("gymnasium", {"name": "x", "path": "y"}, "environment.path=y: environment.kind=gymnasium"),
        ("auto", {"name": "x"}, "environment.name=x: environment.kind=auto with path='' does not read it; allowed: with kind=gymnasium"),
        ("python", {"path": "a:b", "actions": ["x"]}, "environment.actions=['x']: environment.kind=python"),
        ("openenv", {"server": "http://x", "num_processes": 2}, "environment.num_processes=2: environment.kind=openenv"),
        ("none", {"path": "a:b"}, "environment.path=a:b: environment.kind=none"),
    ],
)
def test_settings_that_a_kind_lacks_or_does_not_read(chosen: str, given: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        kind(chosen, **given)


def test_a_package_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"environment\.kind=reasoning_gym: needs reasoning-gym, which is not installed: pip install"):
        build_environment(kind("reasoning_gym", name="chain_sum"))


@pytest.mark.parametrize(
    "arguments",
    [
        ['environment.arguments={"map": {"size": 4, "names": ["a b", "c"]}, "is_slippery": false}'],
        ["environment.arguments={map: {size: 4, names: ['a b', c]}, is_slippery: false}"],
        ["environment.arguments={map:{size:4,names:['a b',c]},is_slippery:false}"],
        ["+environment.arguments.map={size:4,names:['a b',c]}", "+environment.arguments.is_slippery=false"],
        ['environment.arguments.map={"size": 4, "names": ["a b", "c"]}', "environment.arguments.is_slippery=false"],
    ],
)
def test_arguments_are_typed_alike_for_tasks_and_for_training(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["environment.kind=gymnasium", "environment.name=FrozenLake-v1", *arguments]
    seen: list[EnvironmentConfig] = []
    monkeypatch.setattr(validate_data, "_records", lambda config, *_: [seen.append(config)] and iter(()))
    tasks(tmp_path / "a.jsonl", given, 1, 0, "")
    trained = composed("grpo", ["model.path=m", "data.train=d", "reward.function.path=a:b", *given]).environment
    assert seen == [trained] and trained.arguments == {"map": {"size": 4, "names": ["a b", "c"]}, "is_slippery": False}


def test_tasks_are_refused_where_there_are_none(tmp_path: Path) -> None:
    calculator = ["environment.path=aligner.environments.calculator:Calculator"]
    for overrides, file, prompts, complaint in (
        (calculator, "a.jsonl", "", "has no method tasks"),
        (calculator, "a.jsonl", "p.jsonl", "--prompts p.jsonl: .* has no method tools"),
        ([], "a.jsonl", "", r"environment\.kind=auto: has no prompts of its own"),
        (["environment.kind=gymnasium", "environment.name=FrozenLake-v1"], "a.json", "", "expected a name that ends in .jsonl"),
        (["environment.nme=x"], "a.jsonl", "", "environment.nme"),
        (["environment.arguments=1,2"], "a.jsonl", "", "environment.arguments=1,2' lists several values"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            tasks(tmp_path / file, overrides, 1, 0, prompts)
    assert not list(tmp_path.iterdir())
