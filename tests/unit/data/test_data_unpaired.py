"""Judged responses: records, tokens and masks by hand, and what each prompt is paired with to estimate a KL."""

from __future__ import annotations

import pytest

from aligner.data.collate import SupervisedExample
from aligner.data.config import Overlong, UnpairedDataConfig
from aligner.data.judged import UnpairedExample, load_unpaired, mismatched, unpaired_batch

A, B, C = (5 + ord(c) - 32 for c in "abc")  # ids in the character tokenizer
BOS, EOS = 1, 2


def load(path, tokenizer, **settings):
    return load_unpaired(path, UnpairedDataConfig(train=path, **settings), tokenizer)


def test_records_of_every_kind(jsonl, chars):
    path = jsonl(
        {"prompt": "a", "response": "b", "preference": "chosen"},
        {"prompt": "a", "response": "c", "preference": "rejected"},
        {"prompt": "a", "completion": "bb", "label": True},
        {"prompt": "a", "response": "", "preference": 0},  # to say nothing may be bad
        {"prompt": [{"role": "user", "content": "a"}], "response": "c", "preference": 1},
        {"prompt": "b", "chosen": "a", "rejected": "c"},
    )
    examples, report = load(path, chars)
    assert [example.desirable for example in examples] == [True, False, True, False, True, True, False]
    assert examples[0].row.tokens == (BOS, A, B, EOS) and examples[0].row.loss_mask == (False, False, True, True)
    assert (examples[0].prompt, examples[0].response) == ((BOS, A), (B, EOS))
    assert examples[3].response == (EOS,)
    assert [example.response for example in examples[-2:]] == [(A, EOS), (C, EOS)] and examples[-1].prompt == (BOS, B)
    assert examples[-1].row.source == f"{path}:6" and report.num_kept == report.num_records == 7


def test_long_responses(jsonl, chars):
    path = jsonl({"prompt": "a", "response": "bbbb", "preference": True}, {"prompt": "a", "response": "b", "preference": False})
    assert [len(example.row.tokens) for example in load(path, chars, max_length=5, overlong=Overlong.truncate)[0]] == [5, 4]
    assert len(load(path, chars, max_length=5, overlong=Overlong.drop)[0]) == 1


def example(prompt: int, *response: int, desirable: bool = True) -> UnpairedExample:
    row = SupervisedExample(tokens=(prompt, *response), loss_mask=(False, *[True] * len(response)), source=f"test:{prompt}")
    return UnpairedExample(row=row, desirable=desirable)


def test_a_batch():
    batch = unpaired_batch([example(1, 5), example(2, 6, 6, desirable=False)], pad_id=9)
    assert batch.tokens.tolist() == [[1, 5, 9], [2, 6, 6]] and batch.labels.tolist() == [[1.0], [-1.0]]


def rows(examples):
    return [other.row.tokens for other in examples]


def test_every_prompt_gets_the_response_to_another():
    others = mismatched([example(1, 5), example(2, 6, 6), example(3, 7)], max_length=9)
    assert rows(others) == [(1, 7), (2, 5), (3, 6, 6)]
    assert others[2].row.loss_mask == (False, True, True) and others[2].row.source == "test:3"


def test_neighbours_of_one_prompt_do_not_get_each_others_response():
    """Two responses to each of two prompts: moved on by one, half of them would be of the same prompt."""
    pairs = [example(1, 5), example(1, 6), example(2, 7), example(2, 8)]
    assert rows(mismatched(pairs, max_length=9)) == [(1, 7), (1, 8), (2, 5), (2, 6)]
    crowded = [example(1, 5), example(1, 6), example(1, 7), example(2, 8)]  # at best one has no response of its own prompt
    assert sorted(row[1:] for row in rows(mismatched(crowded, max_length=9))) == [(5,), (6,), (7,), (8,)]
    assert rows(mismatched([example(1, 5), example(1, 6)], max_length=9)) == [(1, 6), (1, 5)]


def test_mismatched_rows_are_cut():
    assert rows(mismatched([example(1, 5, 5, 5), example(2, 6)], max_length=3)) == [(1, 6), (2, 5, 5)]
    with pytest.raises(ValueError, match="got one example"):
        mismatched([example(1, 5)], max_length=3)
