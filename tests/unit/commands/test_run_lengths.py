"""How long the sequences of a run may be where its settings leave it open; what the documentation tells to type fits a small model."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.algorithms.registry import recipes
from aligner.commands.plan import command as plan
from aligner.commands.preflight.samples import fitted, load_sample
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError
from aligner.jobs.samples import load_prompt_sets
from aligner.parallel.progress import Progress
from aligner.run.lengths import RESPONSE, fill
from aligner.run.settings import JobRun
from aligner.settings.compose import compose

ROOT = Path(__file__).parents[3]


def config_of(recipe: str, *settings: str) -> JobRun:
    return compose(recipes()[recipe].config, recipe, ["data.train=d", *settings])


def lengths(config: JobRun) -> tuple[int, ...]:
    """(max_length, max_prompt_length, max_history_length, max_response_length), those that there are."""
    names = ("max_length", "max_prompt_length", "max_history_length")
    found = [getattr(config.data, name) for name in names if hasattr(config.data, name)]
    return (*found, config.rollout.sampling.max_response_length) if hasattr(config, "rollout") else tuple(found)


@pytest.mark.parametrize(
    ("recipe", "settings", "context", "expected"),
    [
        ("sft", [], 512, (512,)),
        ("dpo", [], 8192, (8192,)),
        ("annotate", ["data.max_length=100"], 512, (100,)),
        ("grpo", [], 512, (256, 256)),  # the response's usual 256 tokens are no more than half
        ("grpo", [], 100, (50, 50)),
        ("grpo", [], 8192, (8192 - 256, 256)),
        ("ppo", ["data.max_prompt_length=64"], 512, (64, 256)),
        ("ppo", ["data.max_prompt_length=400"], 512, (400, 112)),
        ("generate", [f"{RESPONSE}=96"], 512, (416, 96)),
        ("online_dpo", ["data.max_prompt_length=300", f"{RESPONSE}=212"], 512, (300, 212)),
        ("spin", [], 512, (512, 256, 256)),
        ("constitution", [], 512, (256, 256, 256)),
        ("constitution", [], 8192, (2048, 2048, 256)),  # the usual history
        ("constitution", ["data.max_history_length=500"], 512, (500, 500, 12)),
        ("constitution", ["algorithm.pairs=given", "algorithm.num_revisions=0"], 512, (512, 512, 0)),  # nothing is sampled
    ],
)
def test_what_is_not_set_is_made_of_the_context(recipe: str, settings: list[str], context: int, expected: tuple[int, ...]) -> None:
    assert lengths(fill(config_of(recipe, *settings), {"model": context})) == expected


def test_the_model_with_the_shortest_context_decides() -> None:
    contexts = {"model": 512, "critic.model": 128, "reward.model": 256}
    assert lengths(fill(config_of("ppo"), contexts)) == (64, 64)
    with pytest.raises(
        ConfigError, match=f"data.max_prompt_length=100 .* {RESPONSE}=100: longer than critic.model's context of 128 tokens"
    ):
        fill(config_of("ppo", "data.max_prompt_length=100", f"{RESPONSE}=100"), contexts)


def test_critic_and_reward_model_read_rollouts_too() -> None:
    served = ["reward.serve=true", "reward.model.path=there"]
    assert list(config_of("ppo", "reward.serve=false").readers()) == ["model", "critic.model"]
    assert list(config_of("ppo", *served).readers()) == ["model", "critic.model", "reward.model"]
    assert list(config_of("grpo", *served).readers()) == ["model", "reward.model"]
    own = config_of("ppo", "reward.serve=false", "model.path=a", "critic.model.path=b").readers()
    assert [model.path for model in own.values()] == ["a", "b"]


@pytest.mark.parametrize(
    ("recipe", "settings", "text"),
    [
        ("sft", ["data.max_length=513"], "data.max_length=513: longer than the model's context of 512 tokens"),
        ("grpo", ["data.max_prompt_length=512"], "data.max_prompt_length=512: leaves nothing for rollout.sampling.max_response_length in"),
        ("grpo", [f"{RESPONSE}=600"], "max_response_length=600: leaves nothing for data.max_prompt_length in the model's context of 512"),
        (
            "spin",
            ["data.max_prompt_length=500", f"{RESPONSE}=13"],
            "data.max_prompt_length=500 .*=13: longer than the model's context of 512",
        ),
        (
            "constitution",
            ["data.max_history_length=500", f"{RESPONSE}=13"],
            "max_history_length=500 .*=13: longer than the model's context",
        ),
        ("grpo", [f"{RESPONSE}=0", "rollout.sampling.min_response_length=257"], "min_response_length=257: must be at most .*=256"),
        (
            "ppo",
            ["algorithm.shaping.overlong_buffer=100", "algorithm.shaping.overlong_penalty=1", "data.max_prompt_length=500"],
            "at most .*=12",
        ),
    ],
)
def test_what_is_set_must_fit(recipe: str, settings: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fill(config_of(recipe, *settings), {"model": 512})


def test_a_judge_is_left_room() -> None:
    """The response's half is of what the judge's question and answer leave; what is set is checked when the question is known."""
    config = config_of("self_rewarding")
    assert lengths(fill(config, {"model": 512}, reserved=212)) == (150, 150)
    with pytest.raises(ConfigError, match=r"520 tokens .*\(algorithm.judge_template, .*leave nothing .*the model's context of 512 tokens"):
        fill(config, {"model": 512}, reserved=520)


def test_a_plan_has_the_lengths_of_the_run() -> None:
    (trainer,) = plan.components(plan.load("sft", ["model=llama3_8b"]))
    (actor, *_) = plan.components(plan.load("grpo", ["model=llama3_8b", "data.max_prompt_length=512"]))
    assert trainer.work.length == 8192 and (actor.work.length, actor.work.response_length) == (768, 256)


def test_what_was_read_is_said_of_both_sets(task: Path) -> None:
    said: list[str] = []
    config = config_of(
        "grpo", "data.num_validation_prompts=2", f"data.train={task / 'prompts.jsonl'}", f"data.validation={task / 'prompts.jsonl'}"
    )
    tell = {"say": said.append, "trains_on": lambda report: said.append(report.summary())}
    session = SimpleNamespace(progress=Progress(), **tell)
    train, validation = load_prompt_sets(session, config, load_tokenizer(task / "tokenizer"))
    assert len(train) == 8 and validation == train[:2]
    assert said == [f"{task / 'prompts.jsonl'}: 8 of 8 records used"] * 2


# Records of the recipes that do not read prompts; one of each is longer than the model's context.
SAID = {"prompt": "Once upon a time", "response": " there was a dog."}
TURNS = [{"from": "User", "value": "Once"}, {"from": "Assistant", "value": "upon a time", "label": "quality:4"}]
LOGS = {"log(P(a|x,y))": -1.0, "log(P(y|x))": -2.0}
GROUP = {"prompt_turns": TURNS[:1], "label": "quality:4", "responses": [TURNS[1] | LOGS, TURNS[1] | {"value": "b"} | LOGS]}
LABELS = [1] * 9
PAIR = {"prompt": "Once upon", "chosen": " a time", "rejected": " a dog"}
RECORDS = {
    **dict.fromkeys(("sft", "spin", "teacher_logprobs", "annotate"), SAID),
    **dict.fromkeys(("reward_model", "dpo"), PAIR),
    "kto": SAID | {"preference": True},
    "regression_reward_model": SAID | {"label": LABELS},
    "process_reward_model": {"prompt": "Once", "steps": ["upon", "a time"], "labels": [1, 0]},
    "steerlm": {"conversations": TURNS, "type": "VALUE_TO_TEXT"},
    **dict.fromkeys(("proposals", "steerlm2"), GROUP),
    "distill": {"tokens": [1, 5], "labels": [5, 6], "loss_mask": [0, 1], "topk_logits": [[0], [-1]], "topk_token_ids": [[5], [6]]},
}
COMMAND = re.compile(r"^ *(?:\.venv/bin/)?(?:aligner launch local (\w+)|python examples/nlp/train_(grpo)\.py) (.*)")


def documented() -> list[tuple[str, tuple[str, ...]]]:
    """(recipe, settings) of the commands that README and docs tell to type on one machine."""
    found = []
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = file.read_text().replace("\\\n", " ")
        for recipe, grpo, rest in (match.groups() for match in map(COMMAND.match, text.splitlines()) if match):
            settings = tuple(one for one in shlex.split(rest, comments=True) if "=" in one)
            found.append((recipe or grpo, settings))
    return list(dict.fromkeys(found))


@pytest.mark.shared
@pytest.mark.parametrize(("recipe", "settings"), documented(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else value)
def test_documented_commands_fit_a_context_of_512(recipe: str, settings: tuple[str, ...], tmp_path: Path, shared_data: Path) -> None:
    """As they are written, but for the files and functions that the reader has; what is too long is left out, whatever the recipe."""
    model = shared_data / "stories260k"
    record = RECORDS.get(recipe, {"prompt": "Once upon a time"})
    data = tmp_path / "d.jsonl"
    longer = json.dumps(record).replace("Once", "Once " * 600) if recipe != "distill" else json.dumps(record)
    data.write_text(f"{json.dumps(record)}\n{longer}\n")
    own = {"model.path": model, "reward.model.path": model, "critic.model.path": model, "teacher.path": model, "judge.path": model}
    own |= {"data.train": data, "data.validation": data, "reward.function.path": "aligner.rewards.builtin:happy_words"}
    given = [setting for setting in settings if not setting.startswith(("data.attributes=", "environment.", "+environment."))]
    given = [f"{name}={own.get(name, value)}" for name, _, value in (setting.partition("=") for setting in given)]
    if recipe == "self_rewarding" and "algorithm.judge=reward" not in given:  # the paper's question alone has 1112 of its tokens
        (tmp_path / "judge.txt").write_text("Q: {prompt} A: {response} Score:")
        given += [f"algorithm.judge_template={tmp_path / 'judge.txt'}", "algorithm.max_judgement_length=16"]
    name = next((one.partition("=")[2] for one in given if one.startswith("config=")), recipe)
    config = compose(recipes()[recipe].config, name, [f"data.train={data}", *(one for one in given if not one.startswith("config="))])
    tokenizer = load_tokenizer(model)
    examples, report = load_sample(fitted(config), str(data), tokenizer)
    assert len(examples) >= 1 and report.num_bad == 0
    if recipe != "distill":
        assert report.num_too_long >= 1 and "left out: longer than" in report.summary()


@pytest.mark.shared
def test_the_papers_judge_does_not_fit_a_context_of_512(shared_data: Path) -> None:
    model = shared_data / "stories260k"
    with pytest.raises(ConfigError, match="1355 tokens of the judge's question and answer .* leave nothing for prompts and responses in"):
        fitted(config_of("self_rewarding", f"model.path={model}"))


@pytest.mark.shared
def test_a_context_that_is_set_is_the_models(shared_data: Path) -> None:
    model = shared_data / "stories260k"
    config = config_of("sft", f"model.path={model}", "model.seq_length=200")
    assert lengths(fitted(config)) == (200,)
    assert lengths(replace(config, data=replace(config.data, max_length=0))) == (0,)
