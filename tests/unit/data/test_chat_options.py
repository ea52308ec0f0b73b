"""Chat templates in use: what is learnt by their own marks, which one is taken, tools, and thinking."""

from __future__ import annotations

import pytest

from aligner.data.config import PromptDataConfig, SFTDataConfig, Thinking
from aligner.data.encoding import encode_conversation
from aligner.data.messages import Message
from aligner.data.supervised import load_supervised
from aligner.data.templates import TEMPLATES
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import ConfigError, DataError

TURNS = tuple(Message(role=role, content=text) for role, text in (("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "ef")))
# Thinking of earlier turns is left out, as many templates do.
REASONS = (
    "{% for m in messages %}<u>{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<eos>{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<u>{% endif %}"
)


@pytest.fixture(scope="module")
def plain(make_tokenizer_dir) -> Tokenizer:
    """A tokenizer that brings no template."""
    return load_tokenizer(make_tokenizer_dir(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"))


def settings(template: str, thinking: Thinking = Thinking.template) -> SFTDataConfig:
    return SFTDataConfig(train="x", chat_template=template, thinking=thinking)


def text(tokenizer: Tokenizer, row, *, learnt: bool = False) -> str:
    return tokenizer.decode([token for token, on in zip(row.tokens, row.loss_mask, strict=True) if on or not learnt], skip_special=False)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_masks_are_those_of_transformers(name, plain):
    """Up to the last assistant turn, where a row ends, with an end token behind a template that writes another mark."""
    tokenizer = plain.chatting(settings(name))
    turns = [turn.as_json() for turn in TURNS]
    found = plain._backend.apply_chat_template(turns, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True)
    row = encode_conversation(tokenizer, TURNS)
    size = len(row.tokens) - (plain.eos_id not in found["input_ids"])
    assert list(row.tokens[:size]) == found["input_ids"][:size]
    assert list(map(int, row.loss_mask[:size])) == found["assistant_masks"][:size] and row.loss_mask[-1]
    assert sum(found["assistant_masks"][size:]) == 0
    last = encode_conversation(tokenizer, TURNS, last_only=True)
    assert "ef" in text(plain, last, learnt=True) and "bc" not in text(plain, last, learnt=True)


def test_a_template_by_name_in_a_file_or_unknown(plain, jsonl, tmp_path):
    path = jsonl({"prompt": "a", "response": "b"})
    config = SFTDataConfig(train=path, apply_chat_template=True, chat_template="zephyr")
    (row,), _ = load_supervised(path, config, plain.chatting(config))
    assert text(plain, row) == "<|user|>\na<eos>\n<|assistant|>\nb<eos>" and text(plain, row, learnt=True) == "b<eos>"
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
    (row,), _ = load_supervised(path, config, plain.chatting(settings(str(file))))
    assert text(plain, row) == "<user>a<assistant>b<eos>" and text(plain, row, learnt=True) == "b<eos>"
    with pytest.raises(ConfigError, match="no chat template: .* allowed: data.chat_template=chatml|"):
        load_supervised(path, config, plain)
    with pytest.raises(ConfigError, match="data.chat_template is 'chat-ml', allowed: chatml, qwen2_5, llama2, "):
        PromptDataConfig(train=path, chat_template="chat-ml")
    with pytest.raises(ConfigError, match="data.chat_template is .*none.jinja': .*No such file"):
        plain.chatting(settings(str(tmp_path / "none.jinja")))


def test_a_template_that_has_no_place_for_tools_is_refused(plain):
    tools = ({"type": "function", "function": {"name": "add"}},)
    called = (TURNS[0], Message(role="assistant", content="", tool_calls=tools), Message(role="tool", content="2"), TURNS[3])
    with pytest.raises(DataError, match="cannot write tool_calls"):
        encode_conversation(plain.chatting(settings("chatml")), called)
    with pytest.raises(DataError, match="cannot write tools"):
        encode_conversation(plain.chatting(settings("chatml")).offering(tools), TURNS)
    call = ({"type": "function", "function": {"name": "add", "arguments": {"x": 1}}},)
    called = (called[0], Message(role="assistant", content="", tool_calls=call), *called[2:])
    row = encode_conversation(plain.chatting(settings("qwen2_5")).offering(tools), called)
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text(plain, row)
    learnt = text(plain, row, learnt=True)
    assert learnt.startswith('\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>ef<|im_end|>')


@pytest.mark.parametrize("in_text", [True, False])
def test_thinking_is_kept_or_dropped(plain, tmp_path, in_text):
    def turns(*thoughts: str) -> tuple[Message, ...]:
        texts = [(f"<think>\n{one}\n</think>\n\nb", "") if in_text else ("b", one) for one in thoughts]
        said = [Message(role="assistant", content=content, thinking=thinking) for content, thinking in texts]
        return tuple(turn for one in said for turn in (TURNS[0], one))

    file = tmp_path / "reasons.jinja"
    file.write_text(REASONS)
    kept, dropped = (plain.chatting(settings("chatml", thinking)) for thinking in (Thinking.keep, Thinking.drop))
    assert text(plain, encode_conversation(kept, turns("x", "y"))).count("<think>") == 2
    assert "<think>\nx\n</think>\n\nb<|im_end|>" in text(plain, encode_conversation(kept, turns("x", "y")), learnt=True)
    assert "think" not in text(plain, encode_conversation(dropped, turns("x", "y")))
    if not in_text:
        usual, strict = (plain.chatting(settings(str(file), thinking)) for thinking in (Thinking.template, Thinking.keep))
        assert text(plain, encode_conversation(usual, turns("x", "y")), learnt=True) == "b<eos><think>y</think>b<eos>"
        assert text(plain, encode_conversation(strict, turns("y")), learnt=True) == "<think>y</think>b<eos>"
        with pytest.raises(DataError, match="message 1: the chat template of .* omits its thinking"):
            encode_conversation(strict, turns("x", "y"))
    with pytest.raises(DataError, match="expected something besides thinking"):
        encode_conversation(dropped, (TURNS[0], Message(role="assistant", content="<think>x</think>")))


def test_marks_that_do_not_fit_the_turns_are_refused(plain, tmp_path):
    file = tmp_path / "one.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}x{% endgeneration %}")
    with pytest.raises(DataError, match="marks 1 parts as written by an assistant, expected 2"):
        encode_conversation(plain.chatting(settings(str(file))), TURNS)
