"""`aligner data validate` on the data of every recipe: read as its job reads them, bad lines counted, samples shown."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.algorithms.registry import recipes
from aligner.commands.validate_data import KINDS, inspect
from aligner.data.inspection import render
from aligner.data.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from conftest import TEMPLATE, write_tokenizer  # noqa: E402

SFT = {"prompt": "a", "response": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURNS = [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b", "label": "quality:4"}]
LABELLED = {"system": "", "conversations": TURNS, "mask": "User", "type": "VALUE_TO_TEXT"}
LOGS = {"log(P(a|x,y))": -1, "log(P(y|x))": -2, "log(Q(y|a,x))": -3.5}
GROUP = {"system": "", "prompt_turns": TURNS[:1], "label": "quality:4", "responses": [{"from": "Assistant", "value": t} for t in "bc"]}
PROPOSED = GROUP | {"responses": [one | LOGS for one in GROUP["responses"]]}
DISTILLED = {"tokens": [1, 5], "labels": [5, 6], "loss_mask": [0, 1], "topk_logits": [[0], [-1]], "topk_token_ids": [[5], [6]]}
ASKED = "<bos><extra_id_0>System\n\n<extra_id_1>User\na\n<extra_id_1>Assistant\n"
ENDED = "\n<extra_id_1><eos>]]"

# A record of every recipe, and its rows as they are shown; of all others the record is a prompt.
RECORDS: dict[str, tuple[dict, list[str]]] = {
    **dict.fromkeys(("sft", "teacher_logprobs", "spin"), (SFT, ["<bos>a[[b<eos>]]"])),
    **dict.fromkeys(("reward_model", "dpo"), (PAIR, ["<bos>a[[b<eos>]]", "<bos>a[[c<eos>]]"])),
    "kto": ({"prompt": "a", "response": "b", "preference": True}, ["<bos>a[[b<eos>]]"]),
    "regression_reward_model": (LABELLED, [f"<bos>[[{ASKED[5:]}b\n<extra_id_2>]]"]),
    "process_reward_model": ({"prompt": "a", "steps": ["b"], "labels": [1]}, ["<bos>ab[[\n]]"]),
    "steerlm": (LABELLED, [f"{ASKED}<extra_id_2>quality:4\n[[b{ENDED}"]),
    "steerlm2": (PROPOSED, [f"{ASKED}<extra_id_2>quality:4\n[[{text}{ENDED}" for text in "bc"]),
    "proposals": (GROUP, [f"{ASKED}<extra_id_2>quality:4\n[[{text}{ENDED}" for text in "bc"]),
    "generate": (LABELLED, [f"{ASKED}<extra_id_2>quality:4\n"]),
    "annotate": (LABELLED, [f"{ASKED}b\n<extra_id_2>"]),
    "constitution": ({"prompt": "a"}, ["<bos>\n\nHuman: a\n\nAssistant:"]),
    "distill": (DISTILLED, ["<bos> [[!]]"]),
}
PROMPT = ({"prompt": "a", "answer": "b"}, ["<bos>a"])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    return load_tokenizer(write_tokenizer(folder, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE))


def write(path: Path, *records: object) -> str:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return str(path)


def config_of(recipe: str, path: str, **data: object):
    config = recipes()[recipe].config()
    return replace(config, data=replace(config.data, train=path, **data))


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe(recipe: str, tmp_path: Path, chat: Tokenizer) -> None:
    record, rows = RECORDS.get(recipe, PROMPT)
    path = write(tmp_path / "d.jsonl", record, "{oops", record)
    finding, views = inspect(config_of(recipe, path), path, chat)
    assert [render(row, chat) for row in views[0].rows] == rows
    assert finding.report.num_bad == 1 and finding.report.problems[0].startswith(f"{path}:2: ")
    assert finding.repeated == [(f"{path}:3", f"{path}:1")]


def test_every_kind_is_of_a_recipe() -> None:
    assert set(KINDS.values()) <= set(recipes()) and set(RECORDS) <= set(recipes())


def test_spin_reads_what_its_job_reads(tmp_path: Path, chat: Tokenizer) -> None:
    """The last response alone; a prompt that is too long for the rollouts is left out and counted, a last turn of the user is bad."""
    chats = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    asked = LABELLED | {"conversations": [*TURNS, TURNS[0]]}
    path = write(tmp_path / "d.jsonl", {"messages": chats}, {"prompt": "a" * 30, "response": "b"}, asked)
    finding, (view,) = inspect(config_of("spin", path, max_prompt_length=20), path, chat)
    assert [render(row, chat) for row in view.rows] == ["<bos><u>a<a>b<eos>\n<u>c<a>[[d<eos>]]"]
    assert finding.report.num_too_long == 1
    assert finding.report.problems == (f"{path}:3: ends with a turn that is not learnt, expected a response at the end",)


def test_log_probs_are_shown(tmp_path: Path, chat: Tokenizer) -> None:
    path = write(tmp_path / "d.jsonl", PROPOSED)
    _, (view,) = inspect(config_of("steerlm2", path), path, chat)
    assert [row.note for row in view.rows] == [f"response {n}: log P(a|x,y) + log P(y|x) -3, log Q(y|a,x) -3.5" for n in (1, 2)]
