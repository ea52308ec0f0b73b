"""Tokens as what a client reads: whole characters, no part of a stop string, thinking and tool calls; in any pieces the same."""

from __future__ import annotations

import random

import pytest
from fake_live_engine import END, tokenizer_of

from aligner.data.tokenizer import Tokenizer
from aligner.endpoint.text import CALL, CONTENT, REASONING, Piece, Reply
from aligner.rollout.engine import GenResult
from aligner.types import FinishReason, LogprobKind


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("bytes"))


def result(ids: list[int]) -> GenResult:
    reason = FinishReason.stop if ids[-1:] == [END] else FinishReason.length
    return GenResult(
        index=0, tokens=tuple(ids), logprobs=(0.0,) * len(ids), kind=LogprobKind.sampled, finish_reason=reason, weight_version=0
    )


def replied(tokenizer: Tokenizer, ids: list[int], size: int, prompt: str = "Hello: ", **how: object) -> tuple[Reply, list[Piece]]:
    reply = Reply(tokenizer=tokenizer, prompt=tokenizer.encode(prompt), **how)
    shown = [piece for start in range(0, len(ids), size) for piece in reply.feed(ids[start : start + size])]
    return reply, [*shown, *reply.close(result(ids))]


def without_ids(pieces: list[Piece]) -> list[tuple[str, ...]]:
    return [(one.kind, one.text, one.name, one.arguments) for one in pieces]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_characters_come_whole(tokenizer: Tokenizer, size: int) -> None:
    text = "a\u00e9\u4f60\U0001f642\U0001f642\U0001f469\u200d\U0001f680b" * 3
    reply, shown = replied(tokenizer, [*tokenizer.encode(text), END], size)
    assert "".join(piece.text for piece in shown) == reply.joined(CONTENT) == text
    assert not any("\ufffd" in piece.text for piece in shown)


def test_what_is_no_text_reads_the_same_in_any_pieces(tokenizer: Tokenizer) -> None:
    """Bytes at random: half characters are in front, between and at the end."""
    source = random.Random(3)
    for _ in range(200):
        ids = [source.randrange(256) for _ in range(source.randrange(1, 40))]
        whole, _ = replied(tokenizer, ids, len(ids))
        for size in (1, 3):
            assert replied(tokenizer, ids, size)[0].joined(CONTENT) == whole.joined(CONTENT)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_no_part_of_a_stop_string_is_shown(tokenizer: Tokenizer, size: int) -> None:
    text = "one ENDX two EN END three"
    reply, shown = replied(tokenizer, tokenizer.encode(text), size, stops=["STOP", " END th", "ND "])
    assert "".join(piece.text for piece in shown) == "one ENDX two EN E" and reply.stopped == "ND "
    seen = ""
    reply = Reply(tokenizer=tokenizer, prompt=(), stops=["END"])
    for token in tokenizer.encode("a EN and an END"):
        seen += "".join(piece.text for piece in reply.feed([token]))
        assert not seen.endswith(("E", "EN"))
    assert seen == "a EN and an "
    unfinished, shown = replied(tokenizer, tokenizer.encode("it ends with EN"), size, stops=["END"])
    assert unfinished.joined(CONTENT) == "it ends with EN" and not unfinished.stopped


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm", "days": [1, 2]}}\n</tool_call>'
CALLED = (CALL, "", "weather", '{"place": "Ulm", "days": [1, 2]}')


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WEATHER, [CALLED]),
        (f"Let me see.\n{WEATHER}\n{WEATHER}", [(CONTENT, "Let me see.", "", ""), CALLED, CALLED]),
        (f"<think>\nhm <b>\n</think>\n\nSo:\n{WEATHER}", [(REASONING, "hm <b>", "", ""), (CONTENT, "So:", "", ""), CALLED]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]', [(CALL, "", "f", "{}"), (CALL, "", "g", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [(CALL, "", "f", "{}"), (CALL, "", "g", "{}")]),
        (WEATHER.removesuffix("</tool_call>"), [CALLED]),
        ("<tool_call>not JSON</tool_call> then", [(CONTENT, "<tool_call>not JSON</tool_call> then", "", "")]),
        ('<tool_call>{"name": 3}</tool_call>', [(CONTENT, '<tool_call>{"name": 3}</tool_call>', "", "")]),
        ("a < b <tool_ca", [(CONTENT, "a < b <tool_ca", "", "")]),
        ("<think>no end", [(REASONING, "no end", "", "")]),
        ("said <think>in the middle", [(CONTENT, "said <think>in the middle", "", "")]),
    ],
)  # fmt: skip
def test_thinking_and_tool_calls(tokenizer: Tokenizer, size: int, text: str, expected: list[tuple[str, ...]]) -> None:
    reply, _ = replied(tokenizer, [*tokenizer.encode(text), END], size, thinks=True, has_tools=True)
    assert without_ids(reply.pieces) == expected
    assert reply.finish_reason(result([1, END])) == ("tool_calls" if reply.has_called else "stop")
    assert len({piece.id for piece in reply.pieces if piece.kind == CALL}) == sum(piece.kind == CALL for piece in reply.pieces)


def test_without_tools_and_thinking_marks_are_text(tokenizer: Tokenizer) -> None:
    reply, _ = replied(tokenizer, [*tokenizer.encode(WEATHER), END], 1)
    assert without_ids(reply.pieces) == [(CONTENT, WEATHER, "", "")]


def test_a_prompt_may_begin_the_thinking(tokenizer: Tokenizer) -> None:
    reply, _ = replied(tokenizer, tokenizer.encode("\nhm\n</think>\n\nYes"), 1, prompt="<|assistant|><think>\n", thinks=True)
    assert without_ids(reply.pieces) == [(REASONING, "hm", "", ""), (CONTENT, "Yes", "", "")]
