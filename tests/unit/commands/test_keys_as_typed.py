"""Errors that come after the settings were read name them as they are typed, also where whoever checks does not know whose they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aligner.algorithms.registry import recipes
from aligner.commands.plan import command as plan
from aligner.commands.programs import programs
from aligner.errors import ConfigError
from aligner.jobs.parts import with_lengths
from aligner.jobs.sources import _pin
from aligner.models.config import ModelConfig
from aligner.online.config import OnlineRun
from aligner.servers.components import in_section
from aligner.settings.compose import compose

SIZES = ["num_layers=2", "hidden_size=64", "num_attention_heads=8", "num_key_value_heads=8", "ffn_hidden_size=96", "vocab_size=48"]


def composed(recipe: str, *overrides: str) -> OnlineRun:
    sizes = [f"model.architecture.{size}" for size in (*SIZES, "max_position_embeddings=64")]
    return compose(recipes()[recipe].config, recipe, ["data.train=x", *sizes, *overrides])


@pytest.mark.parametrize(("setting", "error"), [("temperature=-1.0", "must be finite and not negative"), ("top_p=0.0", "must be above 0")])
def test_how_judgements_are_drawn(setting: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm.judge_{re.escape(setting)}: {error}"):
        composed("self_rewarding", f"algorithm.judge_{setting}")


@pytest.mark.parametrize("section", ["critic", "reward"])
def test_the_layout_of_a_server(section: str) -> None:
    serve = ["reward.serve=true", "reward.model.path=x"] if section == "reward" else ["reward.function.path=a:b"]
    config = composed("ppo", *serve, f"{section}.parallel.tp=3", f"{section}.num_processes=4")
    message = f"^{section}.parallel.tp=3 does not divide the 4 ranks of this component; allowed: 1, 2, 4$"
    with pytest.raises(ConfigError, match=message):
        programs("ppo", config, [])
    (server,) = (server for server in config.servers() if server.name == section)
    assert server.check is not None
    with pytest.raises(ConfigError, match=message):
        server.check(config.model, config.model.architecture, 4)


@pytest.mark.parametrize("section", ["critic", "reward"])
def test_the_model_of_a_server(section: str, tmp_path: Path) -> None:
    reward = "reward.serve=true" if section == "reward" else "reward.function.path=a:b"
    config = composed("ppo", reward, f"{section}.model.path={tmp_path / 'none'}")
    for ask in (with_lengths, plan.components):
        with pytest.raises(ConfigError, match=f"^{section}.model.path={tmp_path / 'none'}: no such directory"):
            ask(config)


def test_a_frozen_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^teacher.path=nowhere: no such directory$"):
        _pin(tmp_path / "teacher.json", "teacher", ModelConfig(path="nowhere"))


def test_what_is_of_a_section_and_what_is_not() -> None:
    text = "parallel.tp=3: with parallel.pp=2, reward.model.path=a/model.path, model.safetensors, my.parallel.tp, server.port; data.train"
    with pytest.raises(ConfigError) as raised, in_section("critic"):
        raise ConfigError(text)
    assert str(raised.value) == (
        "critic.parallel.tp=3: with critic.parallel.pp=2, reward.model.path=a/model.path, model.safetensors, my.parallel.tp, "
        "critic.server.port; data.train"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"), in_section(""):
        raise ConfigError(text)
