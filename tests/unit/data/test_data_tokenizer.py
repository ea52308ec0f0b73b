from __future__ import annotations

import json
import shutil

import pytest

from aligner.data.messages import Message
from aligner.data.tokenizer import check_vocabulary, load_tokenizer
from aligner.errors import ConfigError, DataError


def test_encode_adds_nothing_unless_asked_and_decode_gives_the_text_back(chars):
    ids = chars.encode("a b")
    assert ids == [5 + ord("a") - 32, 5, 5 + ord("b") - 32]
    assert chars.decode(ids) == "a b"
    assert chars.decode([1, *ids, 2]) == "a b"
    assert chars.decode([1, *ids, 2], skip_special=False) == "<bos>a b<eos>"
    assert (chars.bos_id, chars.eos_id, chars.pad_id) == (1, 2, 0)
    assert chars.vocab_size == 5 + 96
    assert chars.encode("") == []


def test_save_and_load_again(chars, tmp_path):
    chars.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode("x + y") == chars.encode("x + y")
    assert again.has_chat_template and again.eos_id == 2


def test_missing_directory_and_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.*no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="none of tokenizer.json, tokenizer.model, vocab.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="does not load"):
        load_tokenizer(tmp_path)


def test_code_that_a_tokenizer_brings_is_never_run(chars, tmp_path):
    chars.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    code = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('run')")
    with pytest.raises(
        ConfigError, match="code of its own .*tokenization_own.OwnTokenizer.*never run; allowed: model.tokenizer=DIR"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(caught.value)


def test_missing_end_token_is_an_error(make_tokenizer_dir):
    with pytest.raises(ConfigError, match="no end-of-sequence token: looked for eos_token"):
        load_tokenizer(make_tokenizer_dir(pad_token="<pad>"))


def test_padding_falls_back_to_the_end_token_and_bos_may_be_absent(make_tokenizer_dir):
    tokenizer = load_tokenizer(make_tokenizer_dir(eos_token="<eos>"))
    assert tokenizer.pad_id == 2 and tokenizer.bos_id is None


def test_check_vocabulary_names_both(chars):
    check_vocabulary(chars, 101)
    check_vocabulary(chars, 128)
    with pytest.raises(ConfigError, match=r"ids up to 100 .*model.vocab_size is 100, allowed: at least 101"):
        check_vocabulary(chars, 100)


def test_chat_template(chars, make_tokenizer_dir):
    user = Message(role="user", content="hi")
    assert chars.decode(chars.apply_chat_template([user], add_generation_prompt=True), skip_special=False) == "<bos><u>hi<a>"
    with pytest.raises(DataError, match="no system role"):
        chars.apply_chat_template([Message(role="system", content="s")], add_generation_prompt=True)
    plain = load_tokenizer(make_tokenizer_dir(eos_token="<eos>"))
    with pytest.raises(ConfigError, match="has no chat template: looked for"):
        plain.apply_chat_template([user], add_generation_prompt=True)


def test_stories_round_trip(shared_data, tmp_path):
    tokenizer = load_tokenizer(shared_data("stories260k"))
    text = "Once upon a time, there was a little girl named Lily."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id == 1 and tokenizer.eos_id == 2 and tokenizer.vocab_size == 512
    assert ids[0] != 1 and tokenizer.encode(text, add_special=True) == [1, *ids]
    check_vocabulary(tokenizer, 512)
    with pytest.raises(ConfigError, match="model.vocab_size is 511"):
        check_vocabulary(tokenizer, 511)


def test_stories_continuation_has_no_space_of_its_own(shared_data):
    """SentencePiece puts a space before whatever it is given: "Once" + "upon" encoded apart would read "Once upon"."""
    tokenizer = load_tokenizer(shared_data("stories260k"))
    for prefix, text in (("Once upon", " a time"), ("Once up", "on a time"), ("The end.", "\n\nMore")):
        ids = tokenizer.encode(prefix) + tokenizer.continuation(prefix, text)
        assert tokenizer.decode(ids) == prefix + text


def test_a_sampled_response_is_read_so_that_it_is_encoded_as_it_was(shared_data):
    """What a model wrote and is to learn from: by itself it would read "She" and be learnt as "Lily.She"."""
    tokenizer = load_tokenizer(shared_data("stories260k"))
    prompt = tokenizer.encode("There was a girl named Lily.", add_special=True)
    for text in (" She loved to play.", "\n\nShe", ""):
        sampled = tokenizer.continuation("There was a girl named Lily.", text)
        assert tokenizer.decode_after(prompt, [*sampled, tokenizer.eos_id]) == text
    assert tokenizer.decode_after(prompt, [2], skip_special=False) == "</s>"


def test_damaged_tokenizer_directory_without_json_config(shared_data, tmp_path):
    shutil.copy(shared_data("stories260k") / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="no end-of-sequence token|does not load"):
        load_tokenizer(tmp_path)
