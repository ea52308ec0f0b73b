"""SteerLM's records: what is written, what of it is learnt, and what is refused."""

from __future__ import annotations

import pytest

from aligner.data.config import SFTDataConfig
from aligner.data.encoding import PromptStyle
from aligner.data.labelled import encode_labelled, parse_labelled
from aligner.data.sources import RawRecord
from aligner.data.supervised import load_supervised
from aligner.errors import DataError

TURNS = [
    {"from": "User", "value": "hi", "label": None},
    {"from": "Assistant", "value": "yo", "label": "quality:4"},
    {"from": "User", "value": "why"},
    {"from": "Assistant", "value": "so", "label": "quality:0"},
]
RECORD = {"system": "be kind", "conversations": TURNS, "mask": "User", "type": "VALUE_TO_TEXT"}


def raw(**changes) -> RawRecord:
    value = {name: field for name, field in (RECORD | changes).items() if field is not ...}
    return RawRecord(file="d.jsonl", line=1, index=0, value=value)


def test_labels_are_given_and_texts_are_learnt(chars):
    record = parse_labelled(raw())
    encoded = encode_labelled(chars, record, PromptStyle(apply_chat_template=False, add_bos=True))
    whole = (
        "<extra_id_0>System\nbe kind\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n<extra_id_2>quality:4\nyo\n<extra_id_1>User\nwhy\n"
        "<extra_id_1>Assistant\n<extra_id_2>quality:0\nso\n<extra_id_1>"
    )
    assert chars.decode(encoded.tokens, skip_special=False) == f"<bos>{whole}<eos>"
    learnt = [token for token, mask in zip(encoded.tokens, encoded.loss_mask, strict=True) if mask]
    assert chars.decode(learnt, skip_special=False) == "yo\n<extra_id_1>so\n<extra_id_1><eos>"


def test_without_a_type_labels_are_left_out_and_a_last_turn_that_is_not_learnt_has_no_end(chars):
    record = parse_labelled(raw(type=..., conversations=TURNS[:3], system=...))
    encoded = encode_labelled(chars, record, PromptStyle(apply_chat_template=False, add_bos=False))
    assert chars.decode(encoded.tokens, skip_special=False) == (
        "<extra_id_0>System\n\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\nyo\n<extra_id_1>User\nwhy\n<extra_id_1>"
    )
    assert sum(encoded.loss_mask) == len("yo\n<extra_id_1>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "TEXT_TO_VALUE"}, r"field 'type' is 'TEXT_TO_VALUE', allowed: 'VALUE_TO_TEXT' or none"),
        ({"mask": 3}, r"field 'mask' is 3, expected a non-empty string"),
        ({"conversations": []}, r"field 'conversations' is \[\], expected a non-empty list"),
        ({"conversations": TURNS[:1]}, r"field 'mask' is 'User', which leaves no turn to learn"),
        ({"conversations": [{"from": "User"}]}, r"field 'conversations\[0\]' is .*expected \{from, value, label\}"),
        (
            {"conversations": [TURNS[0], {"from": "A", "value": ""}]},
            r"field 'conversations\[1\]': value is '', expected a non-empty string",
        ),
        ({"conversations": [{"from": "A", "value": "x", "label": "a\nb"}]}, r"label is 'a\\nb', expected one line such as"),
        ({"conversations": [{"from": "A", "value": "x<extra_id_1>"}]}, r"value is 'x<extra_id_1>', which contains a mark of the format"),
    ],
)
def test_bad_records_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        parse_labelled(raw(**changes))


def test_a_file_of_both_formats_loads(chars, jsonl):
    path = jsonl(RECORD, {"prompt": "a", "response": "b"})
    examples, report = load_supervised(path, SFTDataConfig(train=path, max_length=400), chars)
    assert [sum(example.loss_mask) for example in examples] == [len("yo\n<extra_id_1>so\n<extra_id_1>") + 1, 2]
    with pytest.raises(DataError, match=r"d.jsonl:1: field 'type' is 'x'"):
        load_supervised(jsonl(RECORD | {"type": "x"}), SFTDataConfig(train=path), chars)
