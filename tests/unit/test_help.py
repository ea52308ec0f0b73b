"""`--help` of every recipe: what it shows first, its sections, and that everything has a meaning."""

from __future__ import annotations

import functools
import re

import pytest
import settings_file

from aligner.algorithms.registry import recipes
from aligner.errors import ConfigError
from aligner.files import conf_directory
from aligner.run.program import entrypoint
from aligner.settings import explain
from aligner.settings.command_line import CommandLine, read
from aligner.settings.compose import compose, compose_node, shown_values
from aligner.settings.schema import schema_keys


@functools.cache
def shown(recipe: str, topic: str = "", *overrides: str) -> str:
    schema, folders = recipes()[recipe].config, recipes()[recipe].folders()
    keys = list(schema_keys(schema, described=True))
    values = dict(shown_values(compose_node(schema, recipe, overrides, folders), keys))
    return explain.render(keys, values, program=f"aligner train {recipe}", file=recipe, groups=[], topic=topic)


def settings(text: str) -> list[str]:
    return re.findall(r"^  ([a-z_.0-9]+)=", text, re.MULTILINE)


@pytest.mark.parametrize("recipe", recipes())
def test_the_first_page_and_that_everything_has_a_meaning(recipe: str) -> None:
    schema, text = recipes()[recipe].config, shown(recipe)
    assert [key.key for key in schema_keys(schema, described=True) if not key.comment and not key.key.endswith(".arguments.*")] == []
    first, _, sections = text.partition("\nSections (")
    matter = settings(first)
    assert matter[0] == "data.train" and "model.path" in matter
    assert 10 <= len(matter) <= 25
    assert len(text.splitlines()) < 65
    top = {key.key for key in schema_keys(schema) if key.section and "." not in key.key}
    listed = set(re.findall(r"^  ([a-z_]+) +\d+  \S", sections, re.MULTILINE))
    left_out = set(re.findall(r"[a-z_.]+", sections.partition("not used without")[2].partition("\n\nGroups")[0])) & top
    assert listed | left_out == top and not listed & left_out
    command = re.search(r"^Example:\n  aligner train (\S+) (.*)$", text, re.MULTILINE)
    assert command is not None and command[1] == recipe
    config = compose(schema, recipe, command[2].split())
    config.check_complete()


def test_every_setting_that_matters_is_one_of_some_recipe() -> None:
    there = {key.key for recipe in recipes().values() for key in schema_keys(recipe.config)}
    assert set(explain.MATTER) <= there and len(set(explain.MATTER)) == len(explain.MATTER)
    assert {need.partition("=")[0] for needs in explain.NEEDS.values() for need in needs} | set(explain.NEEDS) <= there
    assert set(explain.NEEDED) <= set(recipes())


def test_sections_and_single_settings() -> None:
    sampling = shown("grpo", "rollout.sampling")
    assert set(settings(sampling)) >= {"rollout.sampling.top_p", "rollout.sampling.temperature"}
    assert all(key.startswith("rollout.sampling.") for key in settings(sampling))
    rollout = shown("grpo", "rollout", "rollout.tp=2")
    assert settings(sampling) == [key for key in settings(rollout) if key.startswith("rollout.sampling.")]
    assert "  rollout.tp=2 " in rollout
    assert shown("grpo", "loop.max_steps").splitlines() == [
        line for line in shown("grpo", "loop").splitlines() if line.startswith("  loop.max_steps=")
    ]


@pytest.mark.parametrize("recipe", ["sft", "ppo"])
def test_all_is_all(recipe: str) -> None:
    every = [key.key for key in schema_keys(recipes()[recipe].config) if not key.section and "*" not in key.key]
    assert settings(shown(recipe, "all")) == every


def test_what_nothing_uses_is_left_out() -> None:
    """Servers' sections are on the first page only with a server."""
    line = "not used without reward.serve=true: reward.model, reward.parallel, reward.server, server_client"
    without, served, ppo = shown("grpo"), shown("grpo", "", "reward.serve=true"), shown("ppo")
    assert line in without and "\n  server_client " not in without and "reward.model.path=" not in without
    assert line not in served and "\n  server_client " in served and "  reward.model.path=" in served
    assert "\n  server_client " in ppo and "\n  critic " in ppo
    assert "\n  server_client " not in shown("annotate") and "\n  server_client " in shown("annotate", "", "algorithm.served_by=runs/x")
    assert "rollout.vllm (" not in shown("grpo") and "without rollout.engine=vllm: rollout.vllm" in without
    assert "(not used without reward.serve=true)" in shown("grpo", "reward")


def test_a_topic_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"^--help rolout: did you mean --help rollout\?$"):
        shown("grpo", "rolout")
    with pytest.raises(ConfigError, match="^--help critic: not a section; allowed: all, run, model, "):
        shown("sft", "critic")


@pytest.mark.parametrize("arguments", [["--help", "loop"], ["--help=loop"], ["loop.max_steps=7", "-h", "loop"]])
def test_how_a_topic_is_given(arguments: list[str], capsys) -> None:
    entrypoint(recipes()["sft"].config, "sft")(lambda config: None)(arguments)
    out = capsys.readouterr().out
    assert {key.partition(".")[0] for key in settings(out)} == {"loop"}
    assert ("loop.max_steps=7" in out) == (len(arguments) == 3)


def test_the_settings_file_is_that_of_these_recipes() -> None:
    assert (conf_directory() / explain.SETTINGS_FILE).read_text() == settings_file.content(), "a setting or config changed: make settings"


@pytest.mark.parametrize(("recipe", "topic"), [("sft", ""), ("ppo", "rollout"), ("grpo", "optimizer.lr")])
def test_the_help_without_the_recipe_is_the_same(recipe: str, topic: str) -> None:
    found = explain.of_shipped(recipe, topic, program=f"aligner train {recipe}")
    assert found is not None and found.partition("\nGroups:")[0] == shown(recipe, topic).partition("\nGroups:")[0]


def test_what_the_settings_file_does_not_answer() -> None:
    for arguments in (
        ("--help", "optimizer.lr=1"),
        ("optimizer.lr=1", "--help"),
        (),
        ("--help", "--config-name", "x"),
        ("-h", "--lr", "1"),
    ):
        assert not read(arguments).asks_for_help_only
    assert read(("-h",)).asks_for_help_only and read(("--help", "loop")) == CommandLine(asks="--help", topic="loop")
    assert explain.of_shipped("mine", "", program="x") is None
    with pytest.raises(ConfigError, match="--help rolout: did you mean --help rollout"):
        explain.of_shipped("ppo", "rolout", program="x")
