"""The job of self-rewarding around its algorithm: how the judge is asked, what is kept, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.algorithms.iterations import Answer, SampleFiles
from aligner.algorithms.judge import Judgement, ask_about, scoring_settings
from aligner.algorithms.self_rewarding import TrainSelfRewarding
from aligner.commands.plan import command as plan
from aligner.commands.preflight import samples
from aligner.data.messages import Message
from aligner.data.prompts import load_prompts, question_text, read_questions
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import ConfigError
from aligner.settings.compose import compose

CHAT = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"


def config_of(task: Path, *settings: str) -> TrainSelfRewarding:
    base = [f"model.tokenizer={task / 'tokenizer'}", f"data.train={task / 'prompts.jsonl'}", "data.max_prompt_length=20"]
    sizes = ["model.architecture.num_layers=2", "model.architecture.hidden_size=32", "model.architecture.ffn_hidden_size=64"]
    return compose(TrainSelfRewarding, "self_rewarding", [*base, *sizes, *settings])


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "template.txt").write_text("q {prompt} a {response} s ")
    return f"algorithm.judge_template={tmp_path / 'template.txt'}"


def asked(config: TrainSelfRewarding, tokenizer: Tokenizer, *, context: int = 1000) -> list[str]:
    prompts, _ = load_prompts(config.data.train, config.data, tokenizer)
    _, ask = ask_about(config, prompts, (), tokenizer=tokenizer, context=context)
    return [tokenizer.decode(ask(prompt, tokenizer.encode("42") + [tokenizer.eos_id])) for prompt in prompts]


def test_what_the_judge_is_asked(task: Path, template: str, tmp_path: Path) -> None:
    """Of a chat the words alone, in a chat of its own; the response without its end token."""
    tokenizer = load_tokenizer(task / "tokenizer")
    config = config_of(task, template)
    assert asked(config, tokenizer)[0] == "q 0+1= a 42 s "
    (tmp_path / "chat.jinja").write_text(CHAT)
    tokenizer = tokenizer.chatting(replace(config.data, chat_template=str(tmp_path / "chat.jinja")))
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns[1:]}) + "\n" + json.dumps({"prompt": "1+1="}) + "\n")
    config.data.train = str(tmp_path / "chats.jsonl")
    assert asked(config, tokenizer) == ["u q hi a 42 s  a ", "u q 1+1= a 42 s  a "]
    said = question_text((Message(role="system", content="be kind"), Message(role="user", content="hi")))
    assert said == "System: be kind\n\nUser: hi"
    prompts, _ = load_prompts(config.data.train, config.data, tokenizer)
    one = read_questions(config.data.train, config.data, prompts[1:])
    assert list(one.texts.values()) == ["1+1="] and not one.are_chats


def test_a_judge_needs_room(task: Path, template: str) -> None:
    config = config_of(task, template, "rollout.sampling.max_response_length=8", "algorithm.max_judgement_length=4")
    tokenizer = load_tokenizer(task / "tokenizer")
    asked(config, tokenizer, context=40)
    with pytest.raises(ConfigError, match=r"the judge's template \(8\) \+ data.max_prompt_length \(20\) .* = 40: longer than .* of 39"):
        asked(config, tokenizer, context=39)


def test_settings_that_sample_otherwise(task: Path, template: str) -> None:
    """Names of what is kept depend on all that changes it, and not on where or how long a run is."""

    def said(*settings: str) -> str:
        config = config_of(task, template, *settings)
        prompts, _ = load_prompts(config.data.train, config.data, tokenizer)
        return scoring_settings(config, ask_about(config, prompts, (), tokenizer=tokenizer, context=1000))

    tokenizer = load_tokenizer(task / "tokenizer")
    function = "reward.function.path=aligner.rewards.builtin:exact_match"
    others = ["algorithm.num_judgements=2", "algorithm.highest_score=4", "algorithm.judge_top_p=1", "rollout.sampling.top_k=3", function]
    assert said() == said("loop.max_steps=7", "run.directory=elsewhere", "algorithm.batch_size=8")
    assert len({said(), *(said(one) for one in others)}) == 6


def test_what_is_kept(tmp_path: Path, topology) -> None:
    """Equal to what was written; None where a part is missing, cut short or something else."""
    answers = [Answer(tokens=(1, 2), ended=True, reward=0.1), Answer(tokens=(), ended=False)]
    judgements = [Judgement(scores=(1.5, None), texts=("Score: 1.5", "\ud7ff \N{SNOWMAN}")), Judgement(scores=(), texts=())]
    for kind, items, stem in ((Answer, answers, "part"), (Judgement, judgements, "judgements")):
        files = SampleFiles(tmp_path, kind, stem=stem)
        files.write("one", 0, items)
        path = tmp_path / "one" / f"{stem}_000000.json"
        assert files.read("one", 0) == items and files.read("one", 1) is None and files.read("two", 0) is None
        text = path.read_text()
        for damaged in (text[:-1], "[1]", "[{}]", '[{"token": [1]}]', "{}x", '{"a": 1}'):
            path.write_text(damaged)
            assert files.read("one", 0) is None, damaged
    assert json.loads(text)[1] == {"scores": [], "texts": []}
    SampleFiles(tmp_path, Answer).write("spin", 0, [Answer(tokens=(7,), ended=True)])
    assert (tmp_path / "spin" / "part_000000.json").read_text() == '[{"tokens": [7], "ended": true}]'


def test_preflight(task: Path, template: str, context_of) -> None:
    def found(*settings: str) -> str:
        context = context_of(config_of(task, *settings))
        return samples.reward.judge(context, {0: samples.reward.observe(context)}).found

    small = ["rollout.sampling.max_response_length=8"]
    assert "the policy judges itself, 3 times: asked about" in found(template, *small) and "in 12 tokens" in found(template, *small)
    assert found("algorithm.judge=reward", "reward.function.path=aligner.rewards.builtin:exact_match").startswith("aligner.rewards")
    with pytest.raises(ConfigError, match="judge_template=nowhere: cannot be read"):
        found("algorithm.judge_template=nowhere")


def test_plan(task: Path) -> None:
    sizes = ["model.architecture.vocab_size=64", "algorithm.batch_size=4", "algorithm.group_size=3", "algorithm.num_judgements=2"]
    (actor,) = plan.components(config_of(task, *sizes))
    assert (actor.work.rows, actor.work.extra_rows, actor.work.update_rows, actor.work.unit) == (12, 24, 8, 2) and actor.has_reference


def test_a_scorer_is_needed_where_the_policy_does_not_judge(task: Path) -> None:
    config_of(task).check_complete()
    with pytest.raises(ConfigError, match="name a reward function, or set reward.serve=true"):
        config_of(task, "algorithm.judge=reward").check_complete()
    for setting, text in (
        ("rollout.asynchronous.max_staleness=1", "an iteration is sampled before"),
        ("+environment=calculator", "single"),
    ):
        with pytest.raises(ConfigError, match=text):
            config_of(task, setting)
