"""Chat templates by name write what the published ones write, and say what an assistant wrote.

The published text of five is in TRL's package; of the others the format is written out here, from its source.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from aligner.data.templates import TEMPLATES

MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?\nNow."},
    {"role": "assistant", "content": "4"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds <x>", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": [1, "ü"]}}}] * 2,
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "So", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "Done"},
]


def write(template: str, messages: list, *, asks: bool = False, tools: list | None = None) -> tuple[str, list[str]]:
    """The text, and the parts of it that an assistant wrote."""
    (text,), (spans,) = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        tools=tools,
        add_generation_prompt=asks,
        return_assistant_tokens_mask="generation" in template,
        **MARKS,
    )
    edges = [edge for span in spans for edge in span]
    joined = [edge for edge in edges if edges.count(edge) == 1]  # spans that touch are one
    return text, [text[start:stop] for start, stop in zip(joined[::2], joined[1::2], strict=True)]


@pytest.mark.parametrize(
    ("name", "file"), [("gemma", "gemma"), ("gemma3", "gemma3"), ("llama3", "llama3"), ("phi3", "phi3"), ("qwen2_5", "qwen2_5")]
)
def test_equal_to_the_published_text(name, file):
    trl = pytest.importorskip(
        "trl", reason="the published templates are in trl 1.16, which the `dev` extra installs on Python 3.11 and later"
    )
    published = (Path(trl.__file__).parent / "chat_templates" / f"{file}.jinja").read_text()
    for messages in (TURNS, TURNS[:3], TURNS[:1], [SYSTEM, *TURNS], [SYSTEM, *TURNS[:3]], [*TURNS, TURNS[1]], TURNS[1:]):
        for asks in (False, True):
            try:
                expected = write(published, messages, asks=asks)[0]
            except TemplateError:
                with pytest.raises(TemplateError):
                    write(TEMPLATES[name], messages, asks=asks)
                continue
            assert write(TEMPLATES[name], messages, asks=asks)[0] == expected
    if name == "qwen2_5":
        for messages in (CALLS, [SYSTEM, *CALLS], TURNS):
            assert write(TEMPLATES[name], messages, tools=TOOLS)[0] == write(published, messages, tools=TOOLS)[0]


VICUNA = (
    "<s>A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
ALPACA = "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
FORMATS = {
    # OpenAI's ChatML, as in the documentation of transformers (chat_templating).
    "chatml": ("<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"),
    # meta-llama/llama: llama/generation.py, chat_completion.
    "llama2": ("", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi [/INST] Hello! </s>"),
    # Mistral-7B-Instruct-v0.2's and Mixtral's, as of September 2024.
    "mistral": ("<s>", " [INST] Be brief.\n\n Hi  [/INST] Hello!</s>"),
    # The model card of HuggingFaceH4/zephyr-7b-beta.
    "zephyr": ("<|system|>\nBe brief.</s>\n", "<|user|>\n Hi </s>\n<|assistant|>\nHello!</s>\n"),
    # tatsu-lab/stanford_alpaca: train.py, PROMPT_DICT.
    "alpaca": ("<s>Be brief.\n\n", "### Instruction:\n Hi \n\n### Response:\nHello!</s>\n\n"),
    # lm-sys/FastChat: conversation.py, vicuna_v1.1.
    "vicuna": ("<s>Be brief. ", "USER:  Hi  ASSISTANT: Hello!</s>"),
}
ASKING = {
    "chatml": "<|im_start|>assistant\n",
    "llama2": "",
    "mistral": "",
    "zephyr": "<|assistant|>\n",
    "alpaca": "### Response:\n",
    "vicuna": "ASSISTANT:",
}
ALONE = {
    "chatml": "<|im_start|>user\n Hi <|im_end|>\n",
    "llama2": "<s>[INST] Hi [/INST]",
    "mistral": "<s> [INST]  Hi  [/INST]",
    "zephyr": "<|user|>\n Hi </s>\n",
    "alpaca": f"{ALPACA}### Instruction:\n Hi \n\n",
    "vicuna": f"{VICUNA}USER:  Hi  ",
}


@pytest.mark.parametrize("name", FORMATS)
def test_equal_to_the_published_format(name):
    assert write(TEMPLATES[name], [SYSTEM, *TURNS[:2]])[0] == "".join(FORMATS[name])
    assert write(TEMPLATES[name], TURNS[:1], asks=True)[0] == ALONE[name] + ASKING[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_an_assistant_wrote_ends_with_a_mark_and_follows_its_generation_prompt(name):
    text, written = write(TEMPLATES[name], TURNS)
    assert len(written) == 2
    for part, turn in zip(written, (TURNS[1], TURNS[3]), strict=True):
        assert part.strip().startswith(turn["content"]) and len(part.strip()) > len(turn["content"])
    for number, part in ((1, written[0]), (3, written[1])):
        assert text.startswith(write(TEMPLATES[name], TURNS[:number], asks=True)[0] + part)
