"""The converters of examples/nlp/data on hand-made samples in their data sets' schemas; what they write loads as it should."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from builders import load_module

from aligner.data.config import PreferenceDataConfig, RegressionDataConfig, SFTDataConfig
from aligner.data.judged import load_regression
from aligner.data.supervised import load_preferences, load_supervised

FOLDER = Path(__file__).parents[3] / "examples" / "nlp" / "data"
HELPSTEER = {"helpfulness": 3, "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 2}
TURNS = "a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def program(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # as Python does for a script: they share conversion.py
    return load_module(FOLDER / f"{name}.py", f"converter_{name}")


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """`convert(name, records, *options)`: what the program writes, as objects, and where; or its exit code where it refuses."""

    def run(name: str, records: list[object], *options: str) -> tuple[list[dict], str]:
        source, target = tmp_path / "source.jsonl.gz", tmp_path / "target.jsonl"
        with gzip.open(source, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        monkeypatch.setattr(sys, "argv", [name, str(source), str(target), *options])
        code = program(name).main()
        assert code == 0, code
        return [json.loads(line) for line in target.read_text().splitlines()], str(target)

    return run


def test_helpsteer(convert, chars):
    records = [{"prompt": "a", "response": "b", **HELPSTEER}, {"prompt": TURNS, "response": "d", **HELPSTEER}]
    found, path = convert("helpsteer", records)
    assert found[1] == {"messages": [*MESSAGES, {"role": "assistant", "content": "d"}], "label": HELPSTEER}
    config = RegressionDataConfig(train=path)
    assert [example.labels[4:] for example in load_regression(path, config, chars)[0]] == 2 * [(3.0, 4.0, 4.0, 1.0, 2.0)]
    found, path = convert("helpsteer", records, "--format", "steerlm")
    last = {"from": "Assistant", "value": "d", "label": "helpfulness:3,correctness:4,coherence:4,complexity:1,verbosity:2"}
    assert found[1]["conversations"][-1] == last and [turn["label"] for turn in found[1]["conversations"][:-1]] == [None] * 3
    assert len(load_supervised(path, SFTDataConfig(train=path), chars)[0]) == 2
    assert len(load_regression(path, RegressionDataConfig(train=path), chars)[0]) == 2


def test_helpsteer_preferences(convert, chars):
    both = {"prompt": TURNS, "response_1": "x", "response_2": "y", "split": "train"}
    found, path = convert("helpsteer", [both | {"preference_strength": s} for s in (-2, 0, 1)], "--format", "pairs")
    assert [(pair["chosen"], pair["rejected"], pair["chosen_reward"]) for pair in found] == [("x", "y", 2), ("y", "x", 1)]
    assert found[0]["prompt"] == MESSAGES
    assert [pair.margin for pair in load_preferences(path, PreferenceDataConfig(train=path), chars)[0]] == [2.0, 1.0]
    third = {"domain": "general", "context": MESSAGES, "response1": "x", "response2": "y", "individual_preference": []}  # HelpSteer3
    again, _ = convert("helpsteer", [third | {"overall_preference": s} for s in (-2, 0, 1)], "--format", "pairs")
    assert again == found


def node(number: int, role: str, text: str, *replies: dict, **more: object) -> dict:
    labels = {"spam": {"value": 0.0, "count": 3}, "quality": {"value": 0.75, "count": 3}, "toxicity": {"value": 0.1, "count": 3}}
    base = {"message_id": str(number), "text": text, "role": role, "lang": "en", "review_result": True, "deleted": False, "labels": labels}
    return base | more | {"replies": list(replies)}


TREE = node(
    0,
    "prompter",
    "q",
    node(1, "assistant", "worse", rank=1),
    node(2, "assistant", "best", node(3, "prompter", "more", node(4, "assistant", "end", rank=0)), node(5, "prompter", "left"), rank=0),
    node(6, "assistant", "gone", deleted=True),
    node(7, "assistant", "refused", review_result=False),
    node(8, "assistant", "deutsch", lang="de", rank=2),
)


def flat(message: dict, parent: str | None = None) -> list[dict]:
    labels = {"name": list(message["labels"]), "value": [label["value"] for label in message["labels"].values()]}
    own = {key: value for key, value in message.items() if key != "replies"} | {"parent_id": parent, "labels": labels}
    return [own, *(one for reply in message["replies"] for one in flat(reply, message["message_id"]))]


def test_oasst_trees_and_flat_messages(convert, chars):
    tree = {"message_tree_id": "0", "tree_state": "ready_for_export", "prompt": TREE}
    best, path = convert("oasst", [tree], "--lang", "en")
    assert [[turn["content"] for turn in record["messages"]] for record in best] == [["q", "best", "more", "end"]]
    assert len(load_supervised(path, SFTDataConfig(train=path), chars)[0]) == 1
    for records in ([tree], flat(TREE)):
        found, _ = convert("oasst", records, "--threads", "all", "--format", "steerlm")
        assert [record["conversations"][-1]["value"] for record in found] == ["end", "worse", "deutsch"]
        turns = found[0]["conversations"]
        assert [turn["label"] for turn in turns] == [None, "quality:3,toxicity:0", None, "quality:3,toxicity:0"]
        assert turns[0] == {"from": "User", "value": "q", "label": None}


def test_hh(convert, chars):
    head = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    records = [{"chosen": f"{head} x", "rejected": f"{head} y"}, {"chosen": f"{head} ", "rejected": f"{head} y"}]
    found, path = convert("hh", records)
    assert found == [{"prompt": MESSAGES, "chosen": "x", "rejected": "y"}]
    assert len(load_preferences(path, PreferenceDataConfig(train=path), chars)[0]) == 1
    assert convert("hh", records, "--format", "sft")[0] == [{"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}]
    twice = [{name: dialogue.replace(" b", " b\n\nAssistant: d") for name, dialogue in records[0].items()}]
    assert convert("hh", twice)[0][0]["prompt"][1]["content"] == "b\n\nd"  # a speaker who goes on: templates want turns in turn
    to_nobody = [{name: dialogue.replace("\n\nHuman: c", "") for name, dialogue in records[0].items()}]
    assert convert("hh", to_nobody)[0] == []


def test_ultrafeedback(convert, chars):
    ratings = {aspect: {"Rating": rating, "Rationale": ""} for aspect, rating in (("helpfulness", "5"), ("honesty", "4"), ("x", "N/A"))}
    completions = [
        {"response": "mid", "overall_score": 6.5},
        {"response": "bad", "overall_score": 2.0},
        {"response": "good", "overall_score": None, "annotations": {"helpfulness": {"Rating": "9"}}},
        {"response": "rated", "annotations": ratings},
        {"response": " ", "overall_score": 10.0},
        {"response": "unjudged", "annotations": {}},
    ]
    found, path = convert("ultrafeedback", [{"source": "s", "instruction": "q", "completions": completions}])
    pair = {"chosen": "good", "rejected": "bad", "chosen_reward": 9.0, "rejected_reward": 2.0}
    assert found == [{"prompt": [{"role": "user", "content": "q"}]} | pair]
    assert load_preferences(path, PreferenceDataConfig(train=path), chars)[0][0].margin == 7.0
    found, _ = convert("ultrafeedback", [{"instruction": "q", "completions": completions}], "--pairs", "all")
    assert len(found) == 6 and {"rated"} < {record["chosen"] for record in found}
    turns = [{"role": "user", "content": "q"}]
    conversation = {name: [*turns, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    binarized = {"prompt": "q", "messages": [], "score_chosen": 8.0, "score_rejected": 5.0} | conversation
    (found,), _ = convert("ultrafeedback", [binarized])
    assert found == {"prompt": turns, "chosen": "chosen", "rejected": "rejected", "chosen_reward": 8.0, "rejected_reward": 5.0}


def test_a_record_of_another_data_set_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "s.jsonl", tmp_path / "t.jsonl"
    source.write_text(json.dumps({"prompt": "a", "response": "b", **HELPSTEER}) + '\n{"prompt": "a"}\n')
    for name in ("helpsteer", "hh", "ultrafeedback"):
        monkeypatch.setattr(sys, "argv", [name, str(source), str(target)])
        assert program(name).main() == 2
        line = 2 if name == "helpsteer" else 1
        assert capsys.readouterr().err.startswith(f"error: {source}:{line}: ") and list(tmp_path.iterdir()) == [source]


def test_a_damaged_gzip_file_is_refused(tmp_path, chars):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a", "response": "b"}\n' * 500)[:40])
    from aligner.errors import DataError

    with pytest.raises(DataError, match="is not a readable gzip file"):
        load_supervised(str(path), SFTDataConfig(train=str(path)), chars)
