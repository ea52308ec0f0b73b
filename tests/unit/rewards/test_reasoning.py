"""Reasoning and answer of what models write: the marks of published models, and that no text whatever fails or takes long."""

from __future__ import annotations

import random

import pytest

from aligner.rewards import reasoning
from aligner.rewards.reasoning import split_reasoning

CALL = '<tool_call>{"name": "f"}</tool_call>'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>two and two</think>4", "", ("two and two", "4")),  # DeepSeek, Qwen
        ("<think>\ntwo\n</think>\n\n<answer> 4 </answer>", "", ("two", "4")),  # Hunyuan, R1's first form
        ("two\n</think>\n4", "<|im_start|>assistant\n<think>\n", ("two", "4")),  # the template opens it
        ("<think>two</think>4", "<|im_start|>assistant\n<think>\n", ("two", "4")),  # and the model again
        ("two</think>4", "no text of the prompt", ("two", "4")),
        ("4 </b>", "<think>\n\n</think>\n\n", ("", "4 </b>")),  # the template closed it: Qwen3 without thinking
        ("<think>two and", "", ("two and", "")),
        ("two and", "<think>", ("two and", "")),
        ("", "<think>", ("", "")),
        ("4", "", ("", "4")),
        ("the <think> mark", "", ("", "the <think> mark")),
        ("<think>a</think>the <think> mark", "", ("a", "the <think> mark")),
        (f"<think>a</think>{CALL}\nobserved<think>b</think>4", "", (f"a</think>{CALL}\nobserved<think>b", "4")),
        ("[THINK]two[/THINK]4[TOOL_CALLS]f[ARGS]{}", "[/INST]", ("two", "4[TOOL_CALLS]f[ARGS]{}")),  # Mistral
        ("<|python_tag|>f(1)", "", ("", "<|python_tag|>f(1)")),  # Llama
        ("<|START_THINKING|>two<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>", "", ("two", "4")),  # Cohere
        ("◁think▷two◁/think▷4", "", ("two", "4")),  # Kimi
        ("<|channel>thought\ntwo<channel|>4", "", ("two", "4")),  # Gemma
        ("<|begin_of_thought|>two<|end_of_thought|><|begin_of_solution|>4<|end_of_solution|>", "", ("two", "4")),
        ("<seed:think>two</seed:think>4", "", ("two", "4")),
        (f"{ANALYSIS}two<|end|><|start|>assistant{FINAL}4", "<|start|>assistant", ("two", "4")),  # gpt-oss
        (f"{ANALYSIS}two<|end|><|start|>assistant{FINAL}4<|return|>", "", ("two", "4")),
        (f"{ANALYSIS}two", "", ("two", "")),
        (f"{FINAL}4", "", ("", "4")),
        (f"two<|end|><|start|>assistant{FINAL}4", f"<|start|>assistant{ANALYSIS}", ("two", "4")),
        ("final<|message|>4", "<|start|>assistant<|channel|>", ("", "4")),
        (f"{ANALYSIS}two<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}", "", ("two", "")),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", ("", "")),
        ("the <|channel|> mark", "", ("", "the <|channel|> mark")),
    ],
)
def test_marks_of_published_models(text, prompt, expected):
    assert split_reasoning(text, prompt) == expected


MARKS = [*reasoning._PAIRS, *reasoning._PAIRS.values(), *reasoning._ANSWERS, *reasoning._ANSWERS.values(), ANALYSIS, FINAL]
MARKS += ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "final", *"<|>/[ \n\0\ud800éx"]


def test_no_text_fails_and_what_is_given_is_part_of_it():
    draw = random.Random(5)
    closed = 0
    for _ in range(20_000):
        text, prompt = ("".join(draw.choices(MARKS, k=draw.randrange(8))) for _ in range(2))
        thought, answer = split_reasoning(text, prompt)
        assert thought in text and answer in text and len(thought) + len(answer) <= len(text)
        assert not thought or not answer or text.index(thought) <= text.rindex(answer)
        closed += bool(thought and answer)
    assert closed > 500


@pytest.mark.parametrize("prompt", ["", "<think>", "<|message|>", "<|channel|>"])
def test_long_texts_are_read_once(prompt, monkeypatch):
    """A text of n marks in any order costs a number of slices that its length bounds, of a total length that it bounds too."""

    class Counted(str):
        copied = 0

        def __getitem__(self, key):
            part = str.__getitem__(self, key)
            Counted.copied += len(part)
            return part

    for mark in MARKS:
        for unit in (mark, mark + "x", mark + "<think>", ANALYSIS + mark):
            text = Counted(unit * 500)
            Counted.copied = 0
            split_reasoning(text, prompt)
            assert Counted.copied <= 3 * len(text), unit
    for mark in MARKS[:4]:
        split_reasoning(mark + "x" + mark * 200_000, prompt)  # would not end if it were quadratic
