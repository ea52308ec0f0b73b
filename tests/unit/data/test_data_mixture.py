"""Several sources as one data set: shares worked out by hand, orders that are functions of the step, and lists that are refused."""

from __future__ import annotations

import random

import pytest

from aligner.data.config import (
    DemonstrationDataConfig,
    DistillationDataConfig,
    Overlong,
    PreferenceDataConfig,
    PromptDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from aligner.data.distillation import load_distillation
from aligner.data.judged import load_unpaired
from aligner.data.mixture import Mixture, Source, is_mixture, read_alone, sources
from aligner.data.order import MAX_CYCLE, EpochSampler, MixtureSampler, order_of
from aligner.data.prompts import load_prompts, read_questions
from aligner.data.report import NoUsableRecord
from aligner.data.supervised import load_demonstrations, load_preferences, load_supervised
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, DataError


def mixture(*sizes: int, weights=(), epochs=(), temperature=1.0) -> Mixture:
    named = [
        Source(path=f"{number}.jsonl", name="abcdefgh"[number], weight=(*weights, *[0] * 9)[number], max_epochs=(*epochs, *[0] * 9)[number])
        for number in range(len(sizes))
    ]
    return Mixture(tuple(named), sizes, temperature)


def drawn(order: EpochSampler, steps: int) -> list[int]:
    return [index for step in range(steps) for index in order.indices(step)]


def test_every_source_goes_through_its_own_epochs():
    order = MixtureSampler(mixture(5, 7, weights=(0.5, 0.5)), batch_size=2, seed=3)
    first = [index for index in drawn(order, 35) if index < 5]
    second = [index - 5 for index in drawn(order, 35) if index >= 5]
    assert all(sorted(first[start : start + 5]) == list(range(5)) for start in range(0, 35, 5))
    assert all(sorted(second[start : start + 7]) == list(range(7)) for start in range(0, 35, 7))
    assert first[:5] != first[5:10]
    twins = drawn(MixtureSampler(mixture(50, 50, weights=(1, 1)), batch_size=2, seed=3), 50)
    assert twins[::2] != [index - 50 for index in twins[1::2]]  # files that belong together do not come in one order


def test_a_temperature_takes_the_root_of_the_sizes():
    """Sizes 1 and 4: at T=2 the shares are like 1 and 2, a third and two thirds; at T=1 each example comes once an epoch."""
    assert order_of_shares(mixture(1, 4, temperature=2.0), 30) == [10, 20]
    assert order_of_shares(mixture(1, 4, temperature=1e9), 30) == [15, 15]
    assert order_of_shares(mixture(1, 4), 30) == [6, 24]


def order_of_shares(one: Mixture, count: int) -> list[int]:
    found = drawn(MixtureSampler(one, batch_size=count, seed=0), 1)
    return [sum(index < one.sizes[0] for index in found), sum(index >= one.sizes[0] for index in found)]


def test_without_weights_the_sources_are_one_data_set():
    one = MixtureSampler(mixture(30, 13), batch_size=4, seed=9)
    assert drawn(one, 40) == drawn(EpochSampler(43, 4, 9), 40)
    assert one.metrics(3)["data/epoch"] == 12 / 43 and one.metrics(3)["data/epoch/a"] == pytest.approx(12 / 43)
    picked = one.indices(2)
    assert one.metrics(3)["data/share/a"] == sum(index < 30 for index in picked) / 4


def test_a_source_whose_epochs_are_over_leaves_the_others_their_proportions():
    """a, b, c like 1 : 2 : 1, in cycles b a c b (a and c stand at 1/2, b at 1/4 and 3/4). a has 2 examples for one epoch: its last one is
    the sixth of the run. From there on b and c are like 2 : 1, in cycles b c b."""
    order = MixtureSampler(mixture(2, 50, 50, weights=(1, 2, 1), epochs=(1, 0, 0)), batch_size=3, seed=1)
    of = ["a" if index < 2 else "b" if index < 52 else "c" for index in drawn(order, 5)]
    assert "".join(of) == "bacb" + "ba" + "bcb" * 3
    assert sorted(index for index in drawn(order, 5) if index < 2) == [0, 1]
    assert order.shares(5)["data/epoch/a"] == 1.0 and order.shares(5)["data/epoch/b"] == 9 / 50
    others = [index for index in drawn(order, 26) if 2 <= index < 52]
    assert sorted(others[:50]) == list(range(2, 52))  # b is still in its first epoch
    order.check(10**9)  # b and c go on for ever


def test_the_run_is_refused_where_all_epochs_end_before_it():
    order = MixtureSampler(mixture(4, 6, weights=(1, 1), epochs=(1, 0.5)), batch_size=2, seed=0)
    order.check(3)  # 4 of a and 3 of b: 7 examples
    with pytest.raises(ConfigError, match="^data.train: every source reaches its max_epochs after 7 examples, that is 3 steps of 2;"):
        order.check(4)
    assert len(drawn(order, 3)) == 6
    with pytest.raises(ConfigError, match="after 7 examples"):
        order.indices(3)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (3.14159265, 2.71828182, 0.0001), (1e-9, 1, 1)])
def test_any_stretch_holds_the_shares_and_every_source_has_one(weights):
    order, total = MixtureSampler(mixture(10, 20, 30, weights=weights), batch_size=1000, seed=0), sum(weights)
    for step in (0, 7, 65):
        found = order.indices(step)
        counts = [sum(0 <= i < 10 for i in found), sum(10 <= i < 30 for i in found), sum(i >= 30 for i in found)]
        assert all(abs(count - 1000 * weight / total) <= 3 for count, weight in zip(counts, weights, strict=True))
    cycle = [index for step in range(MAX_CYCLE // 1000 + 1) for index in order.indices(step)][:MAX_CYCLE]
    assert min(sum(index < 10 for index in cycle), sum(index >= 30 for index in cycle)) >= 1


def test_every_step_is_a_function_of_its_number():
    """A resumed run makes a new order, which has seen no step before."""
    settings = dict(weights=(5, 2, 3), epochs=(3, 0, 0))
    forward = [MixtureSampler(mixture(11, 17, 5, **settings), 4, 2).indices(step) for step in range(60)]
    one = MixtureSampler(mixture(11, 17, 5, **settings), 4, 2)
    steps = list(range(60))
    random.Random(0).shuffle(steps)
    assert all(one.indices(step) == forward[step] for step in steps)
    assert MixtureSampler(mixture(11, 17, 5, **settings), 4, 3).indices(9) != forward[9]


def test_the_order_is_pinned():
    """A changed order would silently repeat and skip examples of a resumed run."""
    assert MixtureSampler(mixture(5, 3, weights=(2, 1)), batch_size=9, seed=5).indices(1) == [1, 6, 0, 2, 5, 3, 3, 7, 2]


def test_sources_are_read_with_settings_of_their_own(jsonl, chars):
    plain = jsonl({"q": "ab", "r": "c"}, {"q": "b", "r": "b"}, name="plain.jsonl")
    chat = jsonl({"prompt": "a", "response": "b"}, name="chat.jsonl")
    fields = {"prompt_field": "q", "response_field": "r"}
    train = [{"path": plain, "add_bos": False, "max_records": 1, "name": "text", **fields}, {"path": chat, "apply_chat_template": True}]
    examples, report = load_supervised(train, SFTDataConfig(train=train), chars)
    assert [one.source for one in examples] == [f"{plain}:1", f"{chat}:1"]
    a, b, c = (5 + ord(letter) - 32 for letter in "abc")
    assert [one.tokens for one in examples] == [(a, b, c, 2), (1, 3, a, 4, b, 2)]
    assert report.num_records == 2 and report.summary().splitlines()[-1] == "shares of the 2 sources: text 50.0%, chat 50.0%"


def test_sources_of_several_forms_and_chat_templates(jsonl, make_tokenizer_dir):
    tokenizer = load_tokenizer(make_tokenizer_dir(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")).chatting(
        SFTDataConfig(train="x", chat_template="zephyr")
    )
    chat = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    paths = [jsonl({"conversations": chat}, name=f"{name}.jsonl") for name in "xy"]
    asked = jsonl({"instruction": "a", "input": "", "output": "b"}, name="z.jsonl")
    train = [paths[0], {"path": paths[1], "chat_template": "chatml"}, {"path": asked, "form": "alpaca", "prompt_field": ""}]
    config = SFTDataConfig(train=train, chat_template="zephyr")
    examples, report = load_supervised(config.train, config, tokenizer)
    texts = [tokenizer.decode(one.tokens, skip_special=False) for one in examples]
    assert texts[0] == "<|user|>\na<eos>\n<|assistant|>\nb<eos>" and texts[1].startswith("<|im_start|>user\na<|im_end|>\n")
    assert report.forms == {"sharegpt": 2, "alpaca": 1} and report.uses["conversations"] == "messages"
    prompts = [jsonl({"question": "a"}, name="p.jsonl"), jsonl({"instruction": "b"}, name="q.jsonl")]
    asking = PromptDataConfig(train=[{"path": prompts[0], "prompt_field": "question"}, {"path": prompts[1], "form": "alpaca"}])
    found, _ = load_prompts(asking.train, asking, tokenizer)
    assert set(read_questions(asking.train, asking, list(found)).texts.values()) == {"a", "b"}


def test_several_files_are_what_one_file_of_all_would_be(jsonl, chars):
    first, second = [{"text": "a"}, {"text": "b"}, {"text": "c"}], [{"text": "ab"}, {"text": "bc"}]
    whole, _ = load_prompts(jsonl(*first, *second, name="all.jsonl"), PromptDataConfig(), chars)
    train = [jsonl(*first, name="x.jsonl"), jsonl(*second, name="y.jsonl")]
    config = PromptDataConfig(train=train)
    mixed, report = load_prompts(config.train, config, chars)
    assert [(one.id, one.tokens, one.text) for one in mixed] == [(one.id, one.tokens, one.text) for one in whole]
    assert [mixed[number].id for number in (-1, 0, 3)] == [4, 0, 3] and [one.id for one in mixed[2:4]] == [2, 3] and len(mixed) == 5
    assert report.num_kept == 5 and report.location == ", ".join(train)
    assert mixed.shares([mixed[0], mixed[4], mixed[3]]) == {"data/share/x": 1 / 3, "data/share/y": 2 / 3}
    assert read_questions(config.train, config, [mixed[1], mixed[4]]).texts == {f"{train[0]}:2": "b", f"{train[1]}:2": "bc"}


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("load", "schema", "record", "count"),
    [
        (load_demonstrations, DemonstrationDataConfig, {"prompt": "a", "response": "b"}, 1),
        (load_preferences, PreferenceDataConfig, PAIR, 1),
        (load_unpaired, UnpairedDataConfig, PAIR, 2),
    ],
)
def test_every_kind_of_examples_is_mixed(load, schema, record, count, jsonl, chars):
    train = [{"path": jsonl(record, record, name="x.jsonl"), "weight": 3}, {"path": jsonl(record, name="y.jsonl"), "weight": 1}]
    config = schema(train=train)
    examples, _ = load(config.train, config, chars)
    assert len(examples) == 3 * count
    order = order_of(examples, 8, 0)
    assert {name: value for name, value in order.shares(1).items() if "share" in name} == {"data/share/x": 0.75, "data/share/y": 0.25}


def test_teachers_that_named_different_numbers_of_tokens_do_not_go_together(jsonl, chars):
    def taught(count: int) -> dict[str, object]:
        named = [[5, 6, 7][:count]] * 2
        return {"tokens": [1, 5], "labels": [5, 6], "loss_mask": [1, 1], "topk_logits": [[-2.0] * count] * 2, "topk_token_ids": named}

    two, three = jsonl(taught(2), name="two.jsonl"), jsonl(taught(3), name="three.jsonl")
    examples, _ = load_distillation([two, jsonl(taught(2), name="more.jsonl")], DistillationDataConfig(), chars)
    assert len(examples) == 2
    with pytest.raises(DataError, match=r"different numbers of .*two.jsonl: 2, .*three.jsonl: 3\), expected the same in all"):
        load_distillation([two, three], DistillationDataConfig(), chars)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([], "data.train is [], allowed: a path, or a list such as"),
        (None, "data.train is None, allowed: a path, or a list"),
        ([3], r"data.train[0] is 3, allowed: a path, or {path: ..."),
        ([{"weight": 1}], "data.train[0].path is None, allowed: see data.train"),
        ([{"path": "a.jsonl", "weight": 0}], "data.train[0].weight is 0, allowed: a number above 0"),
        ([{"path": "a.jsonl", "weight": -2.5}], "data.train[0].weight is -2.5, allowed: a number above 0"),
        ([{"path": "a.jsonl", "weight": float("nan")}], "data.train[0].weight is nan, allowed: a number above 0"),
        ([{"path": "a.jsonl", "weight": "much"}], "data.train[0].weight is 'much', allowed: a number above 0"),
        ([{"path": "a.jsonl", "max_records": 1.5}], "data.train[0].max_records is 1.5, allowed: a whole number above 0"),
        ([{"path": "a.jsonl", "weights": 1}], "data.train[0].weights: unknown setting of a source; allowed: path, name, weight,"),
        ([{"path": "a.jsonl", "weight": 1}, "b.jsonl"], "data.train[1] has no weight, and others have one; allowed: a weight for each"),
        (
            ["a.jsonl", {"path": "b.jsonl", "name": "a"}],
            "data.train[1].name is 'a', which an earlier source has; allowed: another name",
        ),
        ([{"path": "a.jsonl", "form": "alpaka"}], "data.train[0].form is 'alpaka', allowed: auto, "),
        ([{"path": "a.jsonl", "chat_template": "chat-ml"}], "data.train[0]: data.chat_template is 'chat-ml', allowed: chatml, "),
        ([{"path": "a.jsonl", "name": "a/b"}], "data.train[0].name is 'a/b', allowed: letters, digits"),
        ([{"path": "a.jsonl", "overlong": "cut"}], "data.train[0].overlong is 'cut', allowed: drop, truncate, refuse"),
        ([{"path": "a.jsonl", "add_bos": "no"}], "data.train[0].add_bos is 'no', allowed: true, false"),
        ([{"path": "a.jsonl", "prompt_field": "q"}], "data.train[0]: data.prompt_field is 'q' and data.response_field is ''"),
        ([{"path": "a.jsonl", "max_length": 5}], "data.train[0].max_length: unknown setting of a source; allowed:"),
    ],
)
def test_lists_that_are_refused(train, said):
    with pytest.raises(ConfigError) as refused:
        SFTDataConfig(train=train)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"mixture_temperature": 2.0},
            "data.mixture_temperature=2: data.train is one path; allowed: 1, or a list of sources without weights",
        ),
        ({"mixture_temperature": 0.0}, "data.mixture_temperature=0.0: must be above 0"),
        ({"train": [{"path": "b", "weight": 1}], "mixture_temperature": 2.0}, "data.mixture_temperature=2: the sources have weights;"),
        ({"validation": [{"path": "b", "weight": 1}]}, "data.validation[0].weight: every record is validated on once; allowed: none"),
        ({"num_workers": 2}, "data.num_workers=2: requires data.cache"),
    ],
)
def test_settings_that_do_not_fit(settings, said):
    with pytest.raises(ConfigError) as refused:
        SFTDataConfig(**{"train": "a.jsonl", **settings})
    assert str(refused.value).startswith(said)
    with pytest.raises(ConfigError, match="^data.cache=c: a teacher's log-probs are read"):
        DistillationDataConfig(train="a", cache="c")


def test_a_source_without_a_usable_record_is_named(jsonl, chars):
    config = SFTDataConfig(train=[jsonl({"prompt": "a", "response": "b"}, name="x.jsonl"), jsonl(name="empty.jsonl")])
    with pytest.raises(NoUsableRecord, match=r"no usable record: .*empty.jsonl: 0 of 0 records used"):
        load_supervised(config.train, config, chars)


def test_sources_alone_and_rows_that_are_no_sources():
    config = SFTDataConfig(train=[{"path": "a", "overlong": "refuse"}, "b"], validation="b")
    assert [(path, one.overlong) for path, one in read_alone(config)] == [("a", Overlong.refuse), ("b", Overlong.drop)]
    assert is_mixture([{"path": "a", "weight": 1}]) and not is_mixture([{"path": "a", "prompt": "b"}]) and not is_mixture([])


def test_files_of_one_stem_get_names_of_their_own():
    found = sources(SFTDataConfig(), ["x/a.jsonl", "x/a.json", "y/a.jsonl"])
    assert [one.name for one in found] == ["x_a", "x_a_1", "y_a"]
