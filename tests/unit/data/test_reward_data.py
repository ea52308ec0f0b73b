"""Labels, regression and step data: tokens and labels by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch

from aligner.data.config import BadLines, Overlong, RegressionDataConfig, StepDataConfig
from aligner.data.judged import labelled_batch, load_regression, load_steps, step_batch
from aligner.data.labelled import MISSING, parse_labels, parse_step_labels
from aligner.errors import DataError

A, B, C = (5 + ord(c) - 32 for c in "abc")  # ids in the character tokenizer
BOS, EOS, USER, ASSISTANT = 1, 2, 3, 4
NAMES = ("good", "long")


def regression(path, tokenizer, **settings):
    return load_regression(path, RegressionDataConfig(train=path, attributes=list(NAMES), **settings), tokenizer)


def steps(path, tokenizer, **settings):
    return load_steps(path, StepDataConfig(train=path, **settings), tokenizer)


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ([3, 0.5], (3.0, 0.5)),
        ([3, None], (3.0, MISSING)),
        ([-100, 1], (MISSING, 1.0)),
        ({"long": 2}, (MISSING, 2.0)),
        ("long:2, good:1", (1.0, 2.0)),
    ],
)
def test_labels_of_every_form(value, labels):
    assert parse_labels(value, NAMES, "label") == labels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1], "label is [1], expected 2 numbers: good, long"),
        ([1, float("nan")], "label: long is nan, expected a finite number"),
        ([1, True], "label: long is True, expected a finite number"),
        ([None, -100], "expected at least one number that is not missing (-100 or null)"),
        ({"bad": 1}, "label has 'bad', allowed: good, long (data.attributes)"),
        ("good:x", "label is 'good:x', expected numbers such as 'quality:4,toxicity:0'"),
        ("good", "expected numbers such as"),
        (3, "label is 3, expected 2 numbers"),
    ],
)
def test_labels_that_are_refused(value, text):
    with pytest.raises(DataError) as caught:
        parse_labels(value, NAMES, "label")
    assert text in str(caught.value)


def test_step_labels():
    assert parse_step_labels([True, False, 0.25, None], 4, "labels") == (1.0, 0.0, 0.25, MISSING)
    for value, text in (([1], "a list of 2 labels"), ([1, 2], "labels has 2, expected"), ([1, "a"], "finite"), ([None, None], "judged")):
        with pytest.raises(DataError, match=text):
            parse_step_labels(value, 2, "labels")


def test_rows_of_every_record(jsonl, chars):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = jsonl(
        {"text": "ab", "label": [1, 2]}, {"prompt": "a", "response": "b", "label": {"good": 1}}, {"messages": chat, "label": "long:2"}
    )
    examples, report = regression(path, chars)
    assert [example.row.tokens for example in examples] == [(BOS, A, B), (BOS, A, B, EOS), (BOS, USER, A, ASSISTANT, B, EOS)]
    assert [example.labels for example in examples] == [(1.0, 2.0), (1.0, MISSING), (MISSING, 2.0)] and report.num_kept == 3
    batch = labelled_batch(examples, 0)
    assert torch.equal(batch.labels, torch.tensor([[1.0, 2.0], [1.0, MISSING], [MISSING, 2.0]])) and batch.lengths.tolist() == [3, 4, 6]


def test_a_conversation_is_an_example_for_each_label(jsonl, chars):
    turns = [("User", "hi", None), ("Assistant", "yo", "good:4"), ("User", "why", None), ("Assistant", "so", "good:0,long:1")]
    record = {"system": "s", "conversations": [{"from": f, "value": v, "label": x} for f, v, x in turns], "mask": "User"}
    examples, report = regression(jsonl(record | {"type": "TEXT_TO_VALUE"}, record), chars)
    head = "<bos><extra_id_0>System\ns\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\nyo\n"
    texts = [chars.decode(example.row.tokens, skip_special=False) for example in examples]
    assert texts == 2 * [f"{head}<extra_id_2>", f"{head}<extra_id_1>User\nwhy\n<extra_id_1>Assistant\nso\n<extra_id_2>"]
    assert [example.labels for example in examples] == 2 * [(4.0, MISSING), (0.0, 1.0)] and report.num_kept == 2


def test_steps_are_judged_at_their_separators(jsonl, chars):
    path = jsonl(
        {"prompt": "a", "steps": ["b", "cc"], "labels": [1, 0]}, {"prompt": "a", "completions": ["b", "c"], "labels": [None, True]}
    )
    (first, second), _ = steps(path, chars, step_separator="\n\n")
    assert chars.decode(first.row.tokens, skip_special=False) == "<bos>ab\n\ncc\n\n"
    assert [i for i, m in enumerate(first.row.loss_mask) if m] == [4, 8] and first.labels == (1.0, 0.0)
    assert [i for i, m in enumerate(second.row.loss_mask) if m] == [7] and second.labels == (1.0,)
    batch = step_batch([first, second], 0)
    expected = torch.zeros(2, 9)
    expected[0, 4], expected[1, 7] = 1, 1
    assert torch.equal(batch.step_labels, expected) and batch.loss_mask.sum() == 3


def test_long_responses_lose_their_last_steps_with_their_labels(jsonl, chars):
    path = jsonl({"prompt": "a", "steps": ["b", "c"], "labels": [1, 0]}, {"prompt": "aaaaa", "steps": ["b"], "labels": [1]})
    kept, report = steps(path, chars, max_length=4, overlong=Overlong.truncate, bad_lines=BadLines.skip)
    assert [example.labels for example in kept] == [(1.0,)] and (report.num_truncated, report.num_bad) == (1, 1)
    assert "no judged step within max_length=4" in report.problems[0]
    assert steps(path, chars, max_length=6, overlong=Overlong.drop)[1].num_too_long == 1
