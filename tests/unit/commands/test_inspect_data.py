"""`aligner data inspect`: the form, how fields are used, and samples."""

from __future__ import annotations

import json

import pytest

from aligner import cli
from aligner.commands.validate_data import kinds_of
from aligner.data.forms import HELPSTEER_ATTRIBUTES

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.fixture
def inspected(tmp_path, capsys):
    def run(*records: object, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        code = cli.main(["data", "inspect", str(path), *options])
        said = capsys.readouterr()
        return code, said.out.replace(str(path), "d.jsonl"), said.err.replace(str(path), "d.jsonl")

    return run


def test_form_fields_and_samples(inspected):
    record = {"instruction": "Translate", "input": "dog", "output": "Hund ü", "system": "Be brief", "id": 1}
    code, out, _ = inspected(*[record] * 5)
    assert code == 0 and "d.jsonl: read as sft (also good for prompts: --kind)\n  form alpaca {instruction, input?, output" in out
    assert "    system, instruction, input, output: the conversation\n  fields that are not used: id (5 records)\n" in out
    asked = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nTranslate\n\ndog<|im_end|>\n<|im_start|>assistant\n"
    sample = f"{asked}[[Hund ü<|im_end|>]]\n"
    assert out.count(sample) == 3


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1] | {"value": "b"}}, "preference"),
        ({"prompt": "q", "completion": "a", "label": False}, "kto"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "steps"),
        ({"text": "q"}, "sft"),
        ({"prompt": "q", "answer": "a"}, "prompts"),
        ({"prompt": "q", "response": "a"} | dict.fromkeys(HELPSTEER_ATTRIBUTES, 1), "regression"),
    ],
)
def test_what_a_form_is_good_for(tmp_path, record, kind):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record))
    assert kinds_of(str(path))[0] == kind


def test_a_kind_may_be_named_and_bad_records_are_shown(inspected):
    code, out, _ = inspected({"prompt": "q", "answer": "1"}, {"prompt": ""}, options=("--kind", "prompts"))
    assert code == 1 and "    answer: the answer, for reward functions\n" in out
    assert "bad: d.jsonl:2: field 'prompt' is ''" in out and "1 of the first 2 records can be used, 1 bad" in out


def test_an_unknown_form_is_refused_with_its_fields(inspected):
    code, _, err = inspected({"question": "q"})
    assert code == 2 and err.startswith(
        "error: d.jsonl:1: has the fields ['question'], expected those of a form: prompt_response {prompt, "
    )
