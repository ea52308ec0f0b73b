# ruff: noqa: E501  (templates are lines)

from __future__ import annotations

import json
from datetime import date
from types import SimpleNamespace

import pytest
from builders import write_byte_tokenizer
from tokenizers import Tokenizer as Written, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aligner.cluster.run_directory import RunDirectory
from aligner.data.config import SFTDataConfig
from aligner.data.encoding import PromptStyle, encode_conversation, encode_prompt, encode_response
from aligner.data.messages import Message
from aligner.data.tokenizer import check_vocabulary, load_tokenizer
from aligner.errors import ConfigError, DataError
from aligner.jobs.parts import load_model_files
from aligner.models.config import ModelConfig


def test_encode_adds_nothing_unless_asked_and_decode_gives_the_text_back(chars):
    ids = chars.encode("a b")
    assert ids == [5 + ord("a") - 32, 5, 5 + ord("b") - 32]
    assert chars.decode(ids) == "a b"
    assert chars.decode([1, *ids, 2]) == "a b"
    assert chars.decode([1, *ids, 2], skip_special=False) == "<bos>a b<eos>"
    assert (chars.bos_id, chars.eos_id, chars.pad_id) == (1, 2, 0)
    assert chars.vocab_size == 5 + 96
    assert chars.encode("") == []


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
        ConfigError, match="needs its own code .*tokenization_own.OwnTokenizer.*never run; allowed: model.tokenizer=DIR"
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


def test_a_tokenizer_without_a_chat_template(make_tokenizer_dir):
    plain = load_tokenizer(make_tokenizer_dir(eos_token="<eos>"))
    with pytest.raises(ConfigError, match="has no chat template: looked for"):
        plain.apply_chat_template([Message(role="user", content="hi")], add_generation_prompt=True)


def test_stories_round_trip(shared_data, tmp_path):
    tokenizer = load_tokenizer(shared_data / "stories260k")
    text = "Once upon a time, there was a little girl named Lily."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id == 1 and tokenizer.eos_id == 2 and tokenizer.vocab_size == 512
    assert ids[0] != 1 and tokenizer.encode(text, add_special=True) == [1, *ids]
    check_vocabulary(tokenizer, 512)
    with pytest.raises(ConfigError, match="model.vocab_size is 511"):
        check_vocabulary(tokenizer, 511)


def test_a_sampled_response_is_read_so_that_it_is_encoded_as_it_was(shared_data):
    """What a model wrote and is to learn from: by itself it would read "She" and be learnt as "Lily.She"."""
    tokenizer = load_tokenizer(shared_data / "stories260k")
    prompt = tokenizer.encode("There was a girl named Lily.", add_special=True)
    for text in (" She loved to play.", "\n\nShe", ""):
        sampled = tokenizer.continuation("There was a girl named Lily.", text)
        assert tokenizer.decode_after(prompt, [*sampled, tokenizer.eos_id]) == text
    assert tokenizer.decode_after(prompt, [2], skip_special=False) == "</s>"


def write_chat(folder, template, **settings):
    """A byte-level tokenizer with this template, or these by name."""
    return write_byte_tokenizer(folder, ("<s>", "</s>", "[gMASK]", "<sop>"), **{"eos_token": "</s>", "chat_template": template} | settings)


@pytest.mark.parametrize(
    ("adds", "bos", "add_bos", "begin"),
    [
        ((), None, None, []),
        ((), "<s>", None, []),  # GPT-2, Pythia, SmolLM2: there is a begin token, and nothing puts it there
        ((), "<s>", True, ["<s>"]),
        (("<s>",), "<s>", None, ["<s>"]),  # Llama, Gemma
        (("<s>",), "<s>", False, []),
        (("[gMASK]", "<sop>"), None, None, ["[gMASK]", "<sop>"]),  # GLM
        ((), None, True, []),
    ],
)
def test_a_text_begins_as_the_tokenizer_itself_begins_it(tmp_path, adds, bos, add_bos, begin):
    tokenizer = load_tokenizer(write_chat(tmp_path / "t", "", adds=adds, **({"bos_token": bos} if bos else {})))
    style = PromptStyle(apply_chat_template=False, add_bos=add_bos)
    ids = [tokenizer._backend.convert_tokens_to_ids(token) for token in begin]
    text = tokenizer._backend.encode("hi", add_special_tokens=False)
    assert encode_prompt(tokenizer, "hi", style) == [*ids, *text]
    assert encode_response(tokenizer, "hi", "!", style).tokens == (*ids, *text, *tokenizer.encode("!"), tokenizer.eos_id)
    if add_bos is None:
        assert encode_prompt(tokenizer, "hi", style) == tokenizer._backend.encode("hi")  # what `transformers` makes of it
    if begin:  # once, if the text has it already
        assert encode_prompt(tokenizer, "".join(begin) + "hi", style) == [*ids, *text]


DEFAULT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
TOOLS = (
    DEFAULT.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}")
    + "{{ tools | tojson if tools else '' }}"
)
CALL = ({"type": "function", "function": {"name": "get", "arguments": {"x": None}}},)
CALLS = tuple(
    Message(role=role, content="c", **more)
    for role, more in (("user", {}), ("assistant", {"tool_calls": CALL}), ("tool", {}), ("assistant", {}))
)


@pytest.mark.parametrize("in_files", [False, True])
def test_the_template_for_tools_is_taken_for_tools_and_their_calls(tmp_path, in_files):
    named = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]
    folder = write_chat(tmp_path / "t", "" if in_files else named)
    if in_files:  # as `transformers` writes them
        (folder / "chat_template.jinja").write_text(DEFAULT)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    tokenizer = load_tokenizer(folder)
    row = encode_conversation(tokenizer, CALLS)
    assert '"name": "get", "arguments": {"x": null}' in tokenizer.decode([t for t, on in zip(row.tokens, row.loss_mask, strict=True) if on])
    told = ({"type": "function", "function": {"name": "get"}},)
    assert tokenizer.decode(encode_prompt(tokenizer.offering(told), CALLS[:1], PromptStyle(apply_chat_template=True))).endswith(
        '"name": "get"}}]'
    )
    assert tokenizer.decode(encode_prompt(tokenizer, CALLS[:1], PromptStyle(apply_chat_template=True))) == "uca"
    own = tokenizer.chatting(SFTDataConfig(train="x", chat_template="tokenizer:tool_use"))
    assert own.has_chat_template and encode_conversation(own, CALLS) == row
    with pytest.raises(ConfigError, match="data.chat_template=tokenizer:rag: the chat templates of tokenizer .* are: default, tool_use"):
        tokenizer.chatting(SFTDataConfig(train="x", chat_template="tokenizer:rag"))


def test_without_a_default_template_others_are_named(tmp_path):
    tokenizer = load_tokenizer(write_chat(tmp_path / "t", [{"name": "tool_use", "template": TOOLS}, {"name": "rag", "template": TOOLS}]))
    assert encode_conversation(tokenizer, CALLS).tokens  # that is for calls
    with pytest.raises(
        DataError,
        match="no default chat template, allowed: data.chat_template=tokenizer:tool_use, data.chat_template=tokenizer:rag",
    ):
        encode_conversation(tokenizer, (CALLS[0], CALLS[3]))


def test_templates_that_write_the_day_get_the_one_that_is_given(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }}" + DEFAULT
    tokenizer = load_tokenizer(write_chat(tmp_path / "t", dated))
    config, style = SFTDataConfig(train="x"), PromptStyle(apply_chat_template=True)
    first = tokenizer.chatting(config, day=date(2024, 7, 26))
    assert first.writes_dates and tokenizer.decode(encode_prompt(first, "hi", style)) == "26 Jul 2024uhia"
    later = tokenizer.chatting(config, day=date(2024, 7, 27))
    assert first.chat_digest != later.chat_digest and first.chatting(config).chat_digest == first.chat_digest  # for the cache
    plain = load_tokenizer(write_chat(tmp_path / "p", DEFAULT))
    assert plain.chatting(config, day=date(2024, 1, 1)).chat_digest == plain.chat_digest != first.chat_digest


def test_the_day_of_a_run_is_its_first_and_is_said_once(tmp_path, capsys):
    folder = write_chat(tmp_path / "t", "{{ strftime_now('%Y') }}" + DEFAULT)
    run = RunDirectory(tmp_path / "run").create()
    made = json.loads(run.identity.read_text())
    run.identity.write_text(json.dumps(made | {"created": "2023-05-06T23:59:59+0200"}))
    session = SimpleNamespace(directory=run, topology=SimpleNamespace(rank=0))
    model = ModelConfig(tokenizer=str(folder))
    tokenizer, _ = [load_model_files(model, SFTDataConfig(train="x"), session) for _ in range(2)][1]
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", PromptStyle(apply_chat_template=True))).startswith("2023u")
    assert capsys.readouterr().out.count("the chat template writes the date: that of the run's first day, 2023-05-06, on every day\n") == 1


def test_what_transformers_makes_of_a_tokenizer_is_compared_with_its_file(tmp_path, monkeypatch):
    """As transformers 5.0 to 5.3 did of LlamaTokenizerFast with a byte-level file: every space was lost."""
    folder = write_chat(tmp_path / "t", "")
    load_tokenizer(folder)
    other = Written.from_file(str(folder / "tokenizer.json"))
    other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    wrong = PreTrainedTokenizerFast(tokenizer_object=other, eos_token="</s>")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: wrong)
    with pytest.raises(ConfigError, match=r"as \w+ transformers .* encodes 'hello world, how are you' as .*by tokenizer.json it is"):
        load_tokenizer(folder)
    spaced = Written.from_file(str(folder / "tokenizer.json"))  # a space before the first word may be a setting
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *_, **__: PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="</s>")
    )
    load_tokenizer(folder)


def test_a_tokenizer_file_that_cuts_or_pads_is_compared_whole(tmp_path):
    folder = write_chat(tmp_path / "t", "")
    file = Written.from_file(str(folder / "tokenizer.json"))
    file.enable_truncation(3)
    file.enable_padding(length=64)
    file.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("hello")) == len(tokenizer.encode(tokenizer.protected("</s>h"))) == 5
