"""Records that would teach a model something else than was meant: each is reported with its line, and by option skipped and counted."""

from __future__ import annotations

from functools import partial

import pytest

from aligner.data.config import (
    BadLines,
    DemonstrationDataConfig,
    Learn,
    Overlong,
    PreferenceDataConfig,
    PromptDataConfig,
    ProposalDataConfig,
    RegressionDataConfig,
    SFTDataConfig,
    StepDataConfig,
    UnpairedDataConfig,
)
from aligner.data.judged import load_regression, load_steps, load_unpaired
from aligner.data.prompts import load_prompts
from aligner.data.proposals import load_proposals
from aligner.data.supervised import load_demonstrations, load_preferences, load_supervised
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import DataError

LOADERS = {
    "sft": (load_supervised, SFTDataConfig),
    "pairs": (load_preferences, PreferenceDataConfig),
    "prompts": (load_prompts, PromptDataConfig),
    "kto": (load_unpaired, UnpairedDataConfig),
    "regression": (load_regression, partial(RegressionDataConfig, attributes=["good", "long"])),
    "steps": (load_steps, StepDataConfig),
    "proposals": (load_proposals, ProposalDataConfig),
    "spin": (load_demonstrations, DemonstrationDataConfig),
}
USER = {"role": "user", "content": "a"}
TURN = {"from": "Assistant", "value": "b", "log(P(a|x,y))": -1.0, "log(P(y|x))": -2.0}
PROPOSED = {"prompt_turns": [{"from": "User", "value": "a"}], "label": "quality:4", "responses": [TURN, TURN | {"value": "c"}]}
GOOD = {
    "sft": {"prompt": "a", "response": "b"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "prompts": {"prompt": "a"},
    "kto": {"prompt": "a", "response": "b", "preference": "chosen"},
    "regression": {"prompt": "a", "response": "b", "label": [1, 2]},
    "steps": {"prompt": "a", "steps": ["b", "c"], "labels": [1, 0]},
    "proposals": PROPOSED,
    "spin": {"prompt": "a", "response": "b"},
}
NAN = float("nan")
TOO_LONG = "allowed: at most data.max_length=1024"
LONG = "a" * 2000
BOT = {"role": "bot", "content": "b"}
SPEAKERS = [{"from": "Human", "value": "a"}, {"from": "Bot", "value": "b"}]
BAD = [
    ("sft", {"prompt": "a", "response": ""}, "expected a non-empty string"),
    ("sft", {"prompt": "a", "response": " \n"}, "not only white space"),
    ("sft", {"messages": [USER, {"role": "assistant", "content": " "}]}, "not only white space"),
    ("sft", {"prompt": "a", "response": "\u200b\ufeff\u2060 \u00ad"}, "not only white space"),  # which no reader sees
    ("sft", {"messages": [USER, {"role": "assistant", "content": "\u200b\n"}]}, "not only white space"),
    ("sft", {"conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "\u2800"}]}, "not only white space"),
    ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "\u200e"}]}, "not only white space"),
    ("sft", {"text": "\ufeff"}, "not only white space"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "\u2060"}, "not only white space"),
    (
        "pairs",
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: \u200b"},
        "rejected response is ' \\u200b'",
    ),
    (
        "pairs",
        {"chosen": [USER, {"role": "assistant", "content": "\u3164"}], "rejected": [USER, BOT | {"role": "assistant"}]},
        "white space",
    ),
    ("kto", {"prompt": "a", "response": "\u200b", "preference": True}, "not only white space"),
    ("spin", {"prompt": "a", "response": "\u2063"}, "not only white space"),
    ("sft", {"messages": [USER, {"role": "bot", "content": "b"}]}, "role is 'bot', allowed: system, user, assistant, tool"),
    ("sft", {"messages": [USER, *2 * [{"role": "assistant", "content": "b"}]]}, "role is 'assistant', like the message before"),
    ("sft", {"messages": [USER]}, "the last message has role 'user', expected 'assistant'"),
    ("sft", {"conversations": SPEAKERS}, "mask' is 'User', which is not among the speakers ['Bot', 'Human']"),
    ("sft", {"prompt": "a" * 2000, "response": "b"}, TOO_LONG),
    ("pairs", {"prompt": LONG, "chosen": "b", "rejected": "c"}, TOO_LONG),
    ("pairs", {"messages": [USER], "prompt": [BOT], "chosen": "b", "rejected": "c"}, "role is 'bot', allowed: system, user"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "expected two different responses"),
    ("pairs", {"prompt": "a", "chosen": " ", "rejected": "b"}, "not only white space"),
    ("pairs", {"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: b"}, "the chosen response is ' '"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_reward": float("nan"), "rejected_reward": 0}, "finite number"),
    ("prompts", {"messages": [USER, {"role": "assistant", "content": "b"}]}, "the last message has role 'assistant'"),
    ("prompts", {"prompt": ""}, "field 'prompt' is '', expected a non-empty string"),
    ("prompts", [1], "is [1], expected a JSON object"),
    ("prompts", {"prompt": 3}, "field 'prompt' is 3, expected a non-empty string"),
    ("prompts", {"prompt": "\ud800"}, "expected text without lone surrogates"),
    ("prompts", {"prompt": "q", "answer": True}, "field 'answer' is True, expected a string or a number"),
    ("prompts", {"messages": []}, "field 'messages' is [], expected a non-empty list"),
    ("prompts", {"messages": ["x"]}, "'messages[0]' is 'x', expected {role, content}"),
    ("sft", {"input": "q"}, "field 'output' is missing"),
    ("pairs", {"prompt": "q", "chosen": "a"}, "field 'rejected' is missing"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_reward": 1}, "is alone"),
    ("kto", {"prompt": "a", "response": "", "preference": "chosen"}, "'response' is '', expected a non-empty string"),
    ("kto", {"prompt": "a", "response": "b", "preference": NAN}, "'preference' is nan"),
    ("kto", {"prompt": "a", "response": "b", "preference": "good"}, "is 'good', allowed: 'chosen' or 'rejected', true or false, 1 or 0"),
    ("kto", {"prompt": "a", "response": "b"}, "has the fields ['prompt', 'response'], expected {prompt, response, preference}"),
    ("kto", {"prompt": "a", "preference": True}, "has the fields ['preference', 'prompt'], expected"),
    ("kto", {"prompt": LONG, "response": "b", "preference": 1}, TOO_LONG),
    ("kto", {"prompt": [BOT], "response": "b", "preference": 1}, "role is 'bot', allowed: system, user"),
    ("regression", {"prompt": "a", "response": "", "label": [1, 2]}, "expected a non-empty string"),
    ("regression", {"text": "a"}, "expected a field 'label'"),
    ("regression", {"conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b"}]}, "no turn with a label"),
    ("regression", {"prompt": "a", "response": "b", "label": [NAN, 2]}, "good is nan, expected a finite number"),
    ("regression", {"prompt": "a", "response": "b", "label": [-100, None]}, "expected at least one number that is not missing"),
    ("regression", {"prompt": LONG, "response": "b", "label": [1, 2]}, TOO_LONG),
    ("regression", {"messages": [USER, BOT], "label": [1, 2]}, "role is 'bot', allowed: system, user"),
    ("steps", {"prompt": "a", "steps": [], "labels": []}, "'steps' is [], expected a non-empty list"),
    ("steps", {"prompt": "a", "steps": ["b", ""], "labels": [1, 0]}, "field 'steps[1]' is ''"),
    ("steps", {"prompt": "a", "steps": ["b"], "labels": [NAN]}, "labels'[0] is nan, expected a finite number"),
    ("steps", {"prompt": "a", "steps": ["b"], "labels": [None]}, "expected at least one step that was judged"),
    ("steps", {"prompt": LONG, "steps": ["b"], "labels": [1]}, TOO_LONG),
    ("steps", {"prompt": [BOT], "steps": ["b"], "labels": [1]}, "role is 'bot', allowed: system, user"),
    ("proposals", PROPOSED | {"responses": [TURN, TURN | {"log(P(a|x,y))": NAN}]}, "field 'responses[1]': 'log(P(a|x,y))' is nan"),
    ("proposals", PROPOSED | {"prompt_turns": [{"from": "User", "value": LONG}]}, TOO_LONG),
    ("proposals", PROPOSED | {"prompt_turns": [{"from": "", "value": "a"}]}, "field 'prompt_turns[0]'"),
    ("proposals", PROPOSED | {"responses": [TURN]}, "field 'responses' has 1 responses, expected at least 2"),
    ("proposals", PROPOSED | {"label": ""}, "field 'label' is '', expected a non-empty string"),
    ("proposals", PROPOSED | {"prompt_turns": []}, "field 'prompt_turns' is [], expected a non-empty list"),
    ("proposals", PROPOSED | {"responses": [TURN, TURN | {"log(P(y|x))": None}]}, "[1]': 'log(P(y|x))' is None"),
    ("proposals", PROPOSED | {"responses": [TURN, "b"]}, "field 'responses[1]' is 'b', expected {from, value, label}"),
    ("spin", {"prompt": "a", "response": " "}, "not only white space"),
    ("spin", {"prompt": LONG, "response": "b"}, TOO_LONG),
    ("spin", {"messages": [USER, BOT]}, "role is 'bot', allowed: system, user"),
]


@pytest.mark.parametrize(("kind", "record", "text"), BAD, ids=[f"{kind}: {text}" for kind, _, text in BAD])
def test_reported_with_its_line_or_skipped(kind, record, text, jsonl, chars):
    load, config = LOADERS[kind]
    if text == TOO_LONG:
        config = partial(config, max_length=1024, overlong=Overlong.refuse)
    path = jsonl(GOOD[kind], record, GOOD[kind])
    with pytest.raises(DataError) as caught:
        load(path, config(train=path), chars)
    assert f"{path}:2: " in str(caught.value) and text in str(caught.value)
    kept, report = load(path, config(train=path, bad_lines=BadLines.skip), chars)
    assert len(kept) == 2 and report.num_bad == 1 and f"{path}:2: " in report.problems[0]
    assert f"2 of 3 records used, 1 bad and skipped (first: {path}:2: " in report.summary()


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "prompts"])
def test_what_is_longer_than_the_context_is_cut_or_dropped_and_counted(kind, jsonl, chars):
    """A response too long loses its end, but not one that nothing would be left of: no mask selects nothing."""
    load, config = LOADERS[kind]
    path = jsonl(GOOD[kind], *[record for one, record, text in BAD if one == kind and text == TOO_LONG])
    config = partial(config, max_length=1024)
    report = load(path, config(train=path), chars)[1]
    assert report.num_too_long == 1 and "1 left out: longer than 1024 tokens (data.max_length), it has 20" in report.summary()
    if kind == "proposals":  # whose log-probs are of whole responses
        return
    with pytest.raises(DataError, match=r":2: .* within max_length=1024") as caught:
        load(path, config(train=path, overlong=Overlong.truncate), chars)
    assert "1 of 2 records" in str(caught.value)


def test_a_template_that_writes_a_second_begin_token(jsonl, make_tokenizer_dir):
    """One that writes its own, and a first message that begins with another; or both from the template."""
    template = "<bos>{% for m in messages %}<u>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    tokenizer = load_tokenizer(make_tokenizer_dir(bos_token="<bos>", eos_token="<eos>", chat_template="{{ bos_token }}" + template))
    path = jsonl({"messages": [USER, {"role": "assistant", "content": "b"}]})
    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template of .* begins with two begin tokens \(id 1\)"):
        load_supervised(path, SFTDataConfig(train=path), tokenizer)
    answer = {"role": "assistant", "content": "b"}
    chats = {
        "prompts": {"messages": [USER]},
        "pairs": {"prompt": [USER], "chosen": "b", "rejected": "c"},
        "kto": {"prompt": [USER], "response": "b", "preference": 1},
        "regression": {"messages": [USER, answer], "label": [1, 2]},
        "steps": {"prompt": [USER], "steps": ["b"], "labels": [1]},
        "spin": {"messages": [USER, answer]},
    }
    for kind, record in chats.items():
        load, config = LOADERS[kind]
        path = jsonl(record)
        with pytest.raises(DataError, match=f"{path}:1: .* begins with two begin tokens"):
            load(path, config(train=path), tokenizer)


def test_which_text_is_learnt(jsonl, chars):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "ab")]
    path = jsonl({"messages": [{"role": r, "content": c} for r, c in turns]})

    def learnt(learn: Learn) -> str:
        ((row,), _) = load_supervised(path, SFTDataConfig(train=path, learn=learn), chars)
        return chars.decode([token for token, mask in zip(row.tokens, row.loss_mask, strict=True) if mask], skip_special=False)

    assert learnt(Learn.responses) == "b<eos>ab<eos>"
    assert learnt(Learn.last_response) == "ab<eos>"
    assert learnt(Learn.everything) == "<u>a<a>b<eos>\n<u>c<a>ab<eos>"  # not the begin token, which nothing comes before
    labelled = [{"from": speaker, "value": text} for speaker, text in (("User", "a"), ("A", "b"), ("User", "c"), ("A", "d"))]
    path = jsonl({"system": "s", "conversations": labelled})
    assert learnt(Learn.last_response) == "d\n<extra_id_1><eos>"
