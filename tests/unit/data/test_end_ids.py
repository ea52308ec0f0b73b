"""What ends a response by a model's files, and how what it wrote is read."""

from __future__ import annotations

import json

import pytest

from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError

NAMES = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.fixture
def directory(make_tokenizer_dir):
    return make_tokenizer_dir(**NAMES)


def write(folder, name, settings):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (2,)),
        ({"generation_config.json": {"eos_token_id": [4, 2, 3]}}, (2, 4, 3)),
        ({"generation_config.json": {"eos_token_id": 3}}, (2, 3)),
        ({"config.json": {"eos_token_id": [7], "vocab_size": 8}}, (2, 7)),
        ({"config.json": {"text_config": {"eos_token_id": [1, 9], "vocab_size": 10}, "eos_token_id": None}}, (2, 1, 9)),
        ({"config.json": {"eos_token_id": 4}, "generation_config.json": {"eos_token_id": [3, 4]}}, (2, 3, 4)),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {"temperature": 0.6}}, (2,)),
    ],
)
def test_every_id_of_the_files_ends_a_response(directory, tmp_path, files, ends):
    for name, settings in files.items():
        write(directory, name, settings)
        write(tmp_path / "model", name, settings)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.end_ids == ends and tokenizer.eos_id == 2  # the tokenizer's own, which ends training data, is the first
    assert tokenizer.offering(({"name": "f"},)).end_ids == ends
    for name in files:
        (directory / name).unlink()
    assert load_tokenizer(directory, tmp_path / "model").end_ids == ends  # `model.tokenizer` names another directory than the model's


@pytest.mark.parametrize(
    ("value", "shown"), [(True, "True"), ("2", "'2'"), ([2, -1], r"\[2, -1\]"), ([2.0], r"\[2\.0\]"), (100, "100"), ([[2]], r"\[\[2\]\]")]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_id_of_the_model_is_an_error(directory, name, value, shown):
    write(directory, "config.json", {"vocab_size": 100})
    write(directory, name, {"vocab_size": 100, "eos_token_id": value})
    with pytest.raises(
        ConfigError, match=rf"{name}: eos_token_id is {shown}, allowed: an id below 100 \(vocab_size of config.json\), a list"
    ):
        load_tokenizer(directory)


def test_damaged_settings_are_named(directory):
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json is not JSON"):
        load_tokenizer(directory)


def test_special_tokens_are_part_of_what_was_written_but_ends_and_padding_are_not(directory):
    write(directory, "generation_config.json", {"eos_token_id": [2, 4]})
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("<u>ab") + [1] + tokenizer.encode("c d")
    assert tokenizer.decode([*ids, 4]) == tokenizer.decode([*ids, 2, 0, 0]) == "<u>ab<bos>c d"
    assert tokenizer.decode([*ids, 4, 0], skip_special=False) == "<u>ab<bos>c d<a><pad>"
    assert tokenizer.decode_after([5], [*ids, 2]) == "<u>ab<bos>c d"
    assert tokenizer.has_special(ids) and not tokenizer.has_special(tokenizer.encode("ab c"))


def test_ids_that_stand_for_no_token(directory):
    tokenizer = load_tokenizer(directory)
    known = tokenizer.vocab_size  # without gaps
    assert tokenizer.missing_ids(known) == [] and tokenizer.missing_ids(known + 3) == [known, known + 1, known + 2]
    settings = json.loads((directory / "tokenizer.json").read_text())
    for token in settings["model"]["vocab"]:
        settings["model"]["vocab"][token] += 2 if settings["model"]["vocab"][token] >= 50 else 0
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    assert load_tokenizer(directory).missing_ids(known + 3) == [50, 51, known + 2]
