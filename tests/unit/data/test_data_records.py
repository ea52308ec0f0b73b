from __future__ import annotations

import pytest

from aligner.data.messages import Message
from aligner.data.records import (
    ConversationRecord,
    ResponseRecord,
    parse_preference,
    parse_prompt,
    parse_supervised,
    parse_text_pair,
    split_dialogue,
)
from aligner.data.sources import RawRecord
from aligner.errors import DataError


def raw(value: object, line: int = 1) -> RawRecord:
    return RawRecord(file="f", line=line, index=line - 1, value=value)


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_prompt_formats():
    assert parse_prompt(raw({"text": "q"})).prompt == "q"
    record = parse_prompt(raw({"prompt": "q", "answer": 42}))
    assert (record.prompt, record.answer) == ("q", "42")
    assert parse_prompt(raw({"messages": [USER], "answer": "a"})).prompt == (Message(role="user", content="q"),)
    gsm8k = parse_prompt(raw({"question": "q", "answer": "a", "solution": "s"}), "question", "solution")
    assert (gsm8k.prompt, gsm8k.answer) == ("q", "s")


def test_supervised_formats():
    expected = ResponseRecord(prompt="q", response="a")
    assert parse_supervised(raw({"input": "q", "output": "a"})) == expected
    assert parse_supervised(raw({"prompt": "q", "response": "a"})) == expected
    assert parse_supervised(raw({"question": "q", "answer": "a"}), "question", "answer") == expected
    conversation = parse_supervised(raw({"messages": [USER, ASSISTANT]}))
    assert conversation == ConversationRecord(messages=(Message(role="user", content="q"), Message(role="assistant", content="a")))


def test_preference_formats():
    record = parse_preference(raw({"prompt": "q", "chosen": "a", "rejected": "b"}))
    assert (record.prompt, record.chosen, record.rejected, record.margin) == ("q", "a", "b", 0.0)
    rewards = {"chosen_reward": 3, "rejected_reward": 0.5}
    assert parse_preference(raw({"prompt": "q", "chosen_response": "a", "rejected_response": "b", **rewards})).margin == 2.5
    hh = parse_preference(raw({"chosen": "\n\nHuman: q\n\nAssistant: aa", "rejected": "\n\nHuman: q\n\nAssistant: ab"}))
    assert (hh.prompt, hh.chosen, hh.rejected) == ("\n\nHuman: q\n\nAssistant:", " aa", " ab")


def test_alternating_texts_are_split_only_where_they_are_dialogues():
    good, bad = raw({"text": "x\n\nAssistant: yes"}), raw({"text": "x\n\nAssistant: no"}, 2)
    assert parse_text_pair(good, bad).prompt == "x\n\nAssistant:"
    plain = parse_text_pair(raw({"text": "good"}), raw({"text": "bad"}, 2))
    assert (plain.prompt, plain.chosen, plain.rejected) == ("", "good", "bad")


def test_split_dialogue_takes_the_last_common_turn():
    """Turn 1 is shared, turn 2 differs; what follows the first difference belongs to the responses, whole."""
    shared = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert split_dialogue(shared + " d", shared + " e\n\nAssistant: f") == (shared, " d", " e\n\nAssistant: f")
    with pytest.raises(DataError, match="expected a common beginning that contains"):
        split_dialogue("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: z\n\nAssistant: b")


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_prompt, [1], r"is \[1\], expected a JSON object"),
        (parse_prompt, {"txt": "q"}, r"has the fields \['txt'\], expected \{prompt\}"),
        (parse_prompt, {"prompt": ""}, "field 'prompt' is '', expected a non-empty string"),
        (parse_prompt, {"prompt": 3}, "field 'prompt' is 3, expected a non-empty string"),
        (parse_prompt, {"prompt": "\ud800"}, "expected text without lone surrogates"),
        (parse_prompt, {"prompt": "q", "answer": True}, "field 'answer' is True, expected a string or a number"),
        (parse_prompt, {"messages": []}, r"field 'messages' is \[\], expected a non-empty list"),
        (parse_prompt, {"messages": [USER, ASSISTANT]}, "last message has role 'assistant', expected 'user'"),
        (parse_prompt, {"messages": [{"role": "bot", "content": "x"}]}, r"'messages\[0\]': role is 'bot', allowed: system, user"),
        (parse_prompt, {"messages": ["x"]}, r"'messages\[0\]' is 'x', expected \{role, content\}"),
        (parse_supervised, {"input": "q"}, "field 'output' is missing"),
        (parse_supervised, {"prompt": "q", "response": ""}, "field 'response' is ''"),
        (parse_supervised, {"messages": [USER]}, "last message has role 'user', expected 'assistant'"),
        (parse_supervised, {"question": "q", "answer": "a"}, "expected {messages}, {prompt, response} or {input, output}"),
        (parse_preference, {"prompt": "q", "chosen": "a"}, "field 'rejected' is missing"),
        (parse_preference, {"prompt": "q", "chosen": "a", "rejected": "a"}, "both 'a', expected two different"),
        (parse_preference, {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_reward": 1}, "is alone"),
        (
            parse_preference,
            {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_reward": float("nan"), "rejected_reward": 0},
            "field 'chosen_reward' is nan, expected a finite number",
        ),
    ],
)
def test_bad_records_say_field_value_and_what_is_allowed(parse, value, message):
    with pytest.raises(DataError, match=message):
        parse(raw(value))


def test_an_odd_last_text_line_is_bad():
    with pytest.raises(DataError, match="odd number of lines"):
        parse_text_pair(raw({"text": "good"}), None)
