"""Prompts under requested attributes, conversations for annotation, and data sets that are written in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.algorithms.annotate import AnnotateConfig
from aligner.algorithms.generate import GenerateConfig
from aligner.data.config import AnnotateDataConfig, RequestDataConfig, SFTDataConfig
from aligner.data.encoding import PromptStyle
from aligner.data.labelled import encode_labelled, load_requests, load_unlabelled, parse_labelled, response_text
from aligner.data.sources import RawRecord
from aligner.data.supervised import load_supervised
from aligner.errors import ConfigError, DataError
from aligner.loop.writing import Parts

TURNS = [
    {"from": "User", "value": "hi"},
    {"from": "Assistant", "value": "yo", "label": "quality:4"},
    {"from": "User", "value": "why"},
    {"from": "Assistant", "value": "so", "label": "quality:1"},
]
CONVERSATION = {"system": "be kind", "conversations": TURNS, "mask": "User", "type": "VALUE_TO_TEXT"}


def requests(path: str, chars, **settings):
    return load_requests(path, RequestDataConfig(train=path, **settings), chars)[0]


def test_a_prompt_under_requested_attributes(jsonl, chars) -> None:
    """It is the beginning of the row that is trained on, token for token; so is the record that comes of it."""
    path = jsonl({"prompt": "why"})
    (request,) = requests(path, chars, attributes="quality:4,humor:2", system="be kind")
    head = "<extra_id_0>System\nbe kind\n<extra_id_1>User\nwhy\n<extra_id_1>Assistant\n<extra_id_2>quality:4,humor:2\n"
    assert chars.decode(request.prompt.tokens, skip_special=False) == f"<bos>{head}"
    record = request.answered("so", logprob=-1.0)
    assert record["conversations"][-1] == {"from": "Assistant", "value": "so", "label": "quality:4,humor:2"}
    row = encode_labelled(
        chars, parse_labelled(RawRecord(file="x", line=1, index=0, value=record)), PromptStyle(apply_chat_template=False, add_bos=True)
    )
    assert row.tokens[: len(request.prompt.tokens)] == request.prompt.tokens
    assert row.loss_mask.index(True) == len(request.prompt.tokens)


def test_a_conversation_is_asked_anew(jsonl, chars) -> None:
    path = jsonl(CONVERSATION)
    (own,), (other,) = requests(path, chars), requests(path, chars, attributes="quality:0")
    assert own.label == "quality:1" and other.label == "quality:0"
    text = chars.decode(own.prompt.tokens, skip_special=False)
    assert text.endswith("<extra_id_2>quality:4\nyo\n<extra_id_1>User\nwhy\n<extra_id_1>Assistant\n<extra_id_2>quality:1\n")
    assert [turn["value"] for turn in other.answered("no")["conversations"]] == ["hi", "yo", "why", "no"]
    unlabelled = jsonl(CONVERSATION | {"conversations": [TURNS[0], {"from": "Assistant", "value": "yo"}]}, name="u.jsonl")
    with pytest.raises(DataError, match="u.jsonl:1: its last turn has no label"):
        requests(unlabelled, chars)


def test_plain_prompts_stay_plain(jsonl, chars) -> None:
    path = jsonl({"prompt": "why"})
    (request,) = requests(path, chars)
    assert request.record is None
    assert request.answered("so") == {"prompt": "why", "response": "so", "source": f"{path}:1"}
    assert response_text("so\n<extra_id_1>User\nmore") == "so" and response_text("so") == "so"
    with pytest.raises(ConfigError, match="data.attributes is 'a"):
        RequestDataConfig(attributes="a\nb")


def test_annotation(jsonl, chars) -> None:
    """Both of the assistant's turns are scored without any label in sight, and what comes of it can be trained on."""
    path = jsonl(CONVERSATION, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    records, _ = load_unlabelled(path, AnnotateDataConfig(train=path), chars)
    assert [record.turns for record in records] == [(1, 3), (1,)]
    texts = [chars.decode(row, skip_special=False) for row in records[0].rows]
    assert texts[0] == "<bos><extra_id_0>System\nbe kind\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\nyo\n<extra_id_2>"
    assert texts[1].endswith("Assistant\nyo\n<extra_id_1>User\nwhy\n<extra_id_1>Assistant\nso\n<extra_id_2>")
    config = AnnotateConfig(attributes=["quality", "humor"])
    labelled = [records[0].labelled([config.label([3.6, -0.2]), config.label([4.9, 1.5])]), records[1].labelled(["quality:0,humor:4"])]
    assert [turn.get("label") for turn in labelled[0]["conversations"]] == [None, "quality:4,humor:0", None, "quality:4,humor:2"]
    out = jsonl(*labelled, name="out.jsonl")
    examples, _ = load_supervised(out, SFTDataConfig(train=out), chars)
    assert "<extra_id_2>quality:0,humor:4\nb" in chars.decode(examples[1].tokens, skip_special=False)


def test_parts(tmp_path: Path) -> None:
    parts = Parts(directory=tmp_path / "parts", made_of={"data": "a"}, num_items=5, part_size=2)
    parts.begin()
    assert (parts.num_parts, parts.num_complete()) == (3, 0)
    for part in (0, 2):
        parts.write(part, [{"n": part}])
    assert parts.num_complete() == 1
    parts.write(1, [{"n": "é"}, {}])
    parts.begin()
    parts.join(tmp_path / "all.jsonl")
    assert [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [{"n": 0}, {"n": "é"}, {}, {"n": 2}]
    with pytest.raises(DataError, match="holds parts of another job: data, part_size differ"):
        Parts(directory=tmp_path / "parts", made_of={"data": "b"}, num_items=5, part_size=3).begin()


def test_bad_settings() -> None:
    for make, text in (
        (lambda: GenerateConfig(num_samples=0), "algorithm.num_samples=0: must be at least 1"),
        (lambda: AnnotateConfig(batch_size=0), "algorithm.batch_size=0: must be at least 1"),
        (lambda: AnnotateConfig(lowest=4), "algorithm.lowest=4: must be below highest=4"),
        (lambda: AnnotateConfig(attributes=[]), r"algorithm.attributes=\[\]: must be names, each once"),
    ):
        with pytest.raises(ConfigError, match=text):
            make()
