"""What the commands know of a constitution's job: its plan, its data, its models, and settings that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.algorithms.chains import ConstitutionConfig, JudgeConfig, Pairs, check_constitution
from aligner.algorithms.constitution import ConstitutionalAI
from aligner.commands.plan import command as plan
from aligner.commands.preflight import models
from aligner.commands.preflight.framework import Level
from aligner.commands.preflight.samples import load_sample
from aligner.data.constitution import Constitution, Principle
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, DataError
from aligner.planner.workload import Phase
from aligner.settings.compose import compose


@pytest.fixture(scope="module")
def planned() -> ConstitutionalAI:
    return plan.load("constitution", ["model=llama3_8b"])


@pytest.mark.parametrize(
    ("algorithm", "judge", "phases", "rows", "length"),
    [
        ({}, "", {Phase.generate, Phase.logprobs}, 256 * 3, 2048 + 256),
        ({"num_revisions": 2, "num_chains": 4, "pairs": Pairs.none}, "", {Phase.generate}, 256 * 4 * 5, 2048 + 256),
        ({"pairs": Pairs.sampled}, "judge", {Phase.generate, Phase.ref_logprobs}, 256 * 4, 2048 + 256),
        ({"num_revisions": 0, "pairs": Pairs.given, "num_questions": 2}, "", {Phase.logprobs}, 256 * 4 * 2, 2048),
    ],
)
def test_the_plan(algorithm, judge, phases, rows, length, planned) -> None:
    (writer,) = plan.components(replace(planned, algorithm=ConstitutionConfig(**algorithm), judge=JudgeConfig(path=judge)))
    assert set(writer.work.phases) == phases and (writer.work.rows, writer.work.length) == (rows, length)
    assert writer.has_reference == bool(judge) and (writer.engine is not None) == (Phase.generate in phases)


def test_the_data_are_read_as_the_job_reads_them(task: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(task / "tokenizer")
    config = compose(ConstitutionalAI, "constitution", [f"data.train={task / 'prompts.jsonl'}", f"model.tokenizer={task / 'tokenizer'}"])
    prompts, report = load_sample(config, config.data.train, tokenizer)
    assert report.num_kept == 8 and prompts[0].tokens == tuple(tokenizer.encode("\n\nHuman: 0+1=\n\nAssistant:"))
    file = tmp_path / "c.yaml"
    file.write_text("principles: []\n")
    with pytest.raises(DataError, match="c.yaml:1: principles is empty"):
        load_sample(replace(config, data=replace(config.data, constitution=str(file))), config.data.train, tokenizer)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "1+1=", "responses": ["2", "3"]}) + "\n")
    given = replace(config, algorithm=ConstitutionConfig(num_revisions=0, pairs=Pairs.given))
    assert load_sample(given, str(pairs), tokenizer)[1].num_kept == 1


def test_the_judge_may_have_a_tokenizer_of_its_own(context_of, settings, planned) -> None:
    """It is sent texts; a critic, which is sent token ids, may not."""
    used = replace(planned, judge=JudgeConfig(path="judge")).models()
    assert [(model.component, model.config.path, model.reads_text) for model in used] == [
        ("trainer", "", False),
        ("judge", "judge", True),
    ]
    context = context_of(settings("sft"))
    seen = models.Tokens(described={"trainer": "a", "judge": "b"}, digests={"trainer": "1", "judge": "2"}, apart=["judge"])
    assert models.judge_tokenizer(context, {0: seen}).level is Level.ok
    assert models.judge_tokenizer(context, {0: replace(seen, apart=[])}).level is Level.fatal


def test_settings_that_do_not_fit() -> None:
    for given, text in (
        (["rollout.asynchronous.max_staleness=1"], "nothing is trained here; allowed: 0"),
        (["judge.path=j", "algorithm.pairs=none"], "judge.path=j: with algorithm.pairs=none no second model is needed"),
        (["judge.path=j", "algorithm.pairs=given", "algorithm.num_revisions=0"], "judge.path=j: with algorithm.pairs=given no second"),
    ):
        with pytest.raises(ConfigError, match=text):
            compose(ConstitutionalAI, "constitution", ["data.train=x", *given])


def test_principles_must_ask_for_what_the_job_does(planned) -> None:
    asks = Constitution(principles=(Principle(name="a", question="?"),))
    with pytest.raises(DataError, match="no principle has critique_request"):
        check_constitution(asks, planned)
    check_constitution(asks, replace(planned, algorithm=ConstitutionConfig(num_revisions=0, pairs=Pairs.sampled)))
    revises = Constitution(principles=(Principle(name="a", critique_request="?", revision_request="!"),))
    with pytest.raises(DataError, match="no principle has a question"):
        check_constitution(revises, planned)
