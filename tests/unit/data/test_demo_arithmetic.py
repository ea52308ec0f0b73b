from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import load_module

from aligner.data.config import PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from aligner.data.prompts import load_prompts
from aligner.data.supervised import load_preferences, load_supervised
from aligner.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "demo" / "arithmetic.py"


@pytest.fixture(scope="module")
def arithmetic():
    return load_module(SCRIPT, "demo_arithmetic")


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def value(prompt: str) -> str:
    a, b = prompt.rstrip("=").split("+")
    return str(int(a) + int(b))


def has_carry(prompt: str) -> bool:
    a, b = prompt.rstrip("=").split("+")
    return int(a[-1]) + int(b[-1]) > 9


def test_files_hold_what_they_promise(arithmetic, tmp_path):
    task = arithmetic.Task(num_sft=500, noise=0.6, num_pairs=700, num_prompts=300, num_validation=40)
    files = arithmetic.generate(0, tmp_path, task)
    sft, pairs, prompts, validation = (read(p) for p in (files.sft, files.pairs, files.prompts, files.validation))
    assert [len(x) for x in (sft, pairs, prompts, validation)] == [500, 700, 300, 40]
    carried = [r for r in sft if has_carry(r["prompt"])]
    wrong = [r for r in sft if r["response"] != value(r["prompt"])]
    assert 0.5 < len(wrong) / len(carried) < 0.7 and 0.4 < len(carried) / 500 < 0.6
    assert all(has_carry(r["prompt"]) and int(r["response"]) == int(value(r["prompt"])) - 10 for r in wrong)
    assert all(r["chosen"] == value(r["prompt"]) != r["rejected"] for r in pairs)
    by_the_carry = sum(abs(int(r["chosen"]) - int(r["rejected"])) == 10 for r in pairs) / 700
    assert 0.5 < by_the_carry < 0.75, "half, and those that are so by chance"
    assert all(r["answer"] == value(r["prompt"]) for r in prompts + validation)
    held_out = {r["prompt"] for r in validation}
    assert len(held_out) == 40 and held_out.isdisjoint(r["prompt"] for r in sft + pairs + prompts)


def test_a_task_without_carries_has_random_mistakes(arithmetic, tmp_path):
    task = arithmetic.Task(first=range(20), second=range(20), carries=False, num_sft=500, noise=0.3)
    sft = read(arithmetic.generate(0, tmp_path, task).sft)
    wrong = [int(r["response"]) - int(value(r["prompt"])) for r in sft if r["response"] != value(r["prompt"])]
    assert 0.2 < len(wrong) / 500 < 0.4 and len(set(wrong)) > 20
    assert max(int(n) for r in sft for n in r["prompt"].rstrip("=").split("+")) == 19


@pytest.mark.parametrize(("a", "b", "wrong"), [(37, 5, "32"), (10, 9, "29"), (85, 5, "80"), (89, 9, "88"), (41, 3, "54")])
def test_what_is_wrong_by_the_carry(arithmetic, a, b, wrong):
    assert arithmetic.wrong_by_the_carry(a, b) == wrong


def test_same_seed_same_bytes(arithmetic, tmp_path):
    task = arithmetic.Task(first=range(10), second=range(10), num_sft=50, num_pairs=50, num_prompts=20, num_validation=10)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arithmetic.generate(seed, tmp_path / name, task)
    for file in ("sft.jsonl", "pairs.jsonl", "prompts.jsonl", "validation.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "sft.jsonl").read_bytes() != (tmp_path / "c" / "sft.jsonl").read_bytes()


def test_tokenizer_is_one_token_per_character(arithmetic, tmp_path):
    arithmetic.write_tokenizer(tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t")
    ids = tokenizer.encode("17+25= -4")
    assert ids == [4 + 1, 4 + 7, 14, 4 + 2, 4 + 5, 16, 17, 15, 4 + 4]
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "17+25= -4"
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 2, 18)


def test_the_files_load_through_the_package(arithmetic, tmp_path):
    files = arithmetic.generate(
        0, tmp_path, arithmetic.Task(first=range(10), second=range(10), num_sft=30, num_pairs=30, num_prompts=30, num_validation=10)
    )
    tokenizer = load_tokenizer(files.tokenizer)
    sft, prompts, pairs = str(files.sft), str(files.prompts), str(files.pairs)
    row = load_supervised(sft, SFTDataConfig(train=sft, max_length=16), tokenizer)[0][0]
    assert row.tokens[0] == tokenizer.bos_id and row.tokens[-1] == tokenizer.eos_id
    prompt = load_prompts(prompts, PromptDataConfig(train=prompts, max_prompt_length=16), tokenizer)[0][0]
    assert tokenizer.decode(prompt.tokens) == prompt.text and prompt.answer == value(prompt.text)
    assert len(load_preferences(pairs, PreferenceDataConfig(train=pairs, max_length=16), tokenizer)[0]) == 30


def test_exact_match(arithmetic):
    assert arithmetic.is_correct(" 42", "42") and not arithmetic.is_correct("420", "42") and not arithmetic.is_correct("", "42")


def test_impossible_tasks_and_the_command_line(arithmetic, tmp_path):
    with pytest.raises(ValueError, match="num_validation is 100, allowed: 1 to 99"):
        arithmetic.Task(first=range(10), second=range(10), num_validation=100)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out"), "--noise", "0.5", "--seed", "3"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert [Path(p).name for p in listed] == [
        "tokenizer",
        "sft.jsonl",
        "pairs.jsonl",
        "prompts.jsonl",
        "validation.jsonl",
        "validation_pairs.jsonl",
    ]
    assert all(Path(p).exists() for p in listed)
