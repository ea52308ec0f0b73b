"""Files as other programs have them are read as they are: one of each row of the table in docs/data.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aligner.data.config import PreferenceDataConfig, PromptDataConfig, SFTDataConfig, UnpairedDataConfig
from aligner.data.judged import load_unpaired
from aligner.data.prompts import load_prompts
from aligner.data.supervised import load_preferences, load_supervised

LOADERS: dict[str, tuple[Callable[..., Any], type]] = {
    "SFT": (load_supervised, SFTDataConfig),
    "prompts": (load_prompts, PromptDataConfig),
    "pairs": (load_preferences, PreferenceDataConfig),
    "KTO": (load_unpaired, UnpairedDataConfig),
}
ASKED, SAID = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
ALPACA = {"instruction": "2+2?", "input": "", "output": "4"}
GRADED = {"prompt": [ASKED], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "4"}}
VERL = {"data_source": "openai/gsm8k", **GRADED, "extra_info": {"split": "train", "index": 0, "answer": "so 4", "question": "2+2?"}}
STEERED = {"system": "s", "mask": "User", "type": "VALUE_TO_TEXT"} | {
    "conversations": [{"from": "User", "value": "2+2?"}, {"from": "Assistant", "value": "4", "label": "quality:4"}]
}
# Row of the table, what it is read for, name of the file or directory, its records, settings, the text and the answer that are found.
READ = [
    ("TRL", "prompts", "d.parquet", [{"prompt": [ASKED], "solution": "4"}], {}, "<bos><u>2+2?<a>", "4"),
    ("TRL", "SFT", "d.jsonl", [{"prompt": "2+2?", "completion": "4"}], {}, "<bos>2+2?[4<eos>]", None),
    ("TRL", "SFT", "d.parquet", [{"messages": [ASKED, SAID]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("TRL", "pairs", "d.parquet", [{"chosen": [ASKED, SAID], "rejected": [ASKED, WRONG]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("TRL", "KTO", "d.jsonl", [{"prompt": "2+2?", "completion": "4", "label": True}] * 2, {}, "<bos>2+2?[4<eos>]", None),
    ("verl", "prompts", "train.parquet", [VERL], {}, "<bos><u>2+2?<a>", "4"),
    ("OpenRLHF", "SFT", "d.jsonl", [{"input": "2+2?", "output": "4"}], {}, "<bos>2+2?[4<eos>]", None),
    ("OpenRLHF", "pairs", "d.jsonl", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}], {}, "<bos>2+2?[4<eos>]", None),
    ("OpenRLHF", "prompts", "d.jsonl", [{"input": "2+2?", "label": "4"}], {"prompt_field": "input", "answer_field": "label"}, "2+2?", "4"),
    ("LLaMA-Factory", "SFT", "alpaca_en_demo.json", [ALPACA | {"system": "", "history": []}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("LLaMA-Factory", "SFT", "glaive.json", [{"conversations": [HUMAN, GPT], "tools": "[]"}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    (
        "LLaMA-Factory",
        "pairs",
        "dpo.json",
        [{"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "5"}}],
        {},
        "[4<eos>]",
        None,
    ),
    ("LLaMA-Factory", "KTO", "kto.json", [{"messages": None, **ALPACA, "kto_tag": True}] * 2, {}, "<bos>2+2?[4<eos>]", None),
    ("axolotl", "SFT", "d.jsonl", [{"messages": [ASKED, SAID]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("axolotl", "SFT", "d.jsonl.gz", [ALPACA], {}, "<bos>2+2?[4<eos>]", None),
    ("ms-swift", "SFT", "d.jsonl", [{"messages": [ASKED, SAID]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("ms-swift", "prompts", "d.jsonl", [{"messages": [ASKED], "solution": "4"}], {}, "<bos><u>2+2?<a>", "4"),
    (
        "ms-swift",
        "SFT",
        "d.csv",
        [{"query": "2+2?", "response": "4"}],
        {"prompt_field": "query", "response_field": "response"},
        "2+2?[4",
        None,
    ),
    ("NeMo-Aligner", "SFT", "train.jsonl", [{"input": "2+2?", "output": "4"}], {}, "<bos>2+2?[4<eos>]", None),
    ("NeMo-Aligner", "SFT", "train.jsonl", [STEERED], {}, "[4\n", None),
    ("NeMo-Aligner", "pairs", "d.jsonl", [{"prompt": "2+2?", "chosen_response": "4", "rejected_response": "5"}], {}, "2+2?[4<eos>]", None),
    ("NeMo-Aligner", "pairs", "d.jsonl", [{"text": "Q\n\nAssistant: 4"}, {"text": "Q\n\nAssistant: 5"}], {}, "Assistant:[ 4<eos>]", None),
    ("ShareGPT", "SFT", "d.json", [{"id": "x_0", "conversations": [HUMAN, GPT]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("Alpaca", "SFT", "alpaca_data.json", [ALPACA], {}, "<bos>2+2?[4<eos>]", None),
    ("OpenAI", "SFT", "d.jsonl", [{"messages": [ASKED | {"name": "x"}, SAID]}], {}, "<bos><u>2+2?<a>[4<eos>]", None),
    ("`datasets`", "prompts", "save_to_disk", [{"prompt": "2+2?", "answer": "4"}], {}, "<bos>2+2?", "4"),
    ("`datasets`", "prompts", "save_to_disk of splits", [{"prompt": "2+2?", "answer": "4"}], {}, "<bos>2+2?", "4"),
    ("`datasets`", "prompts", "to_json.json", [{"prompt": "2+2?", "answer": "4"}] * 2, {}, "<bos>2+2?", "4"),
    ("Hugging Face Hub", "prompts", "snapshot", [{"prompt": "2+2?", "ground_truth": "4"}], {}, "<bos>2+2?", "4"),
]


def write(place: Path, records: list[dict[str, Any]]) -> None:
    """The file or directory that the program named by its suffix, or it, would write."""
    import datasets

    rows = datasets.Dataset.from_list(records)
    if place.name.startswith("save_to_disk"):
        other = datasets.Dataset.from_list([{"prompt": "of another split"}])
        (rows if place.name == "save_to_disk" else datasets.DatasetDict({"test": other, "train": rows})).save_to_disk(str(place))
    elif place.name == "snapshot":
        (place / "data").mkdir(parents=True)
        rows.to_parquet(place / "data" / "train-00000-of-00001.parquet")
        datasets.Dataset.from_list([{"prompt": "of another split"}]).to_parquet(place / "data" / "test-00000-of-00001.parquet")
        for name in ("README.md", ".gitattributes", "dataset_infos.json"):
            (place / name).write_text("{}")
    elif place.suffix == ".parquet":
        rows.to_parquet(place)
    elif place.suffix == ".csv":
        rows.to_csv(place)
    elif place.suffix == ".json" and place.name != "to_json.json":
        place.write_text("\ufeff" + json.dumps(records, indent=2))
    else:
        rows.to_json(place, compression="infer")


@pytest.mark.parametrize(
    ("program", "use", "name", "records", "settings", "text", "answer"), READ, ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in READ]
)
def test_a_file_of_each_program_is_read_as_it_is(program, use, name, records, settings, text, answer, tmp_path, chars):
    place = tmp_path / name
    write(place, records)
    load, config = LOADERS[use]
    examples, report = load(str(place), config(train=str(place), **settings), chars)
    assert report.num_bad == 0 and report.num_kept == report.num_records
    example = examples[0]
    if use == "prompts":
        assert text in chars.decode(example.tokens, skip_special=False) and example.answer == answer
        assert example.columns == {name: value for name, value in records[0].items()}
        return
    row = {"pairs": lambda: example.chosen, "KTO": lambda: example.row, "SFT": lambda: example}[use]()
    start = row.loss_mask.index(True)
    stop = len(row.loss_mask) - row.loss_mask[::-1].index(True)
    found = [chars.decode(one, skip_special=False) for one in (row.tokens[:start], row.tokens[start:stop], row.tokens[stop:])]
    assert text in "{}[{}]{}".format(*found)
