from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.errors import DataError
from aligner.reporting.rollout_table import SampleRow, cell, markdown_table, plain_table, read_rows, write_rows
from aligner.types import FinishReason, SampleTurn, TokenTable


def _row(prompt: str = "2+2=", response: str = "4", reward: float = 1.0) -> SampleRow:
    return SampleRow(prompt=prompt, response=response, reward=reward, finish_reason=FinishReason.stop)


def test_rows_are_written_in_full(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 12, [_row(response="é\n" * 500), _row(reward=math.nan)])
    assert path.name == "step_000012.jsonl"
    first, second = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert first == {"prompt": "2+2=", "response": "é\n" * 500, "reward": 1.0, "finish_reason": "stop"}
    assert second["reward"] == "NaN"
    assert [p.name for p in tmp_path.iterdir()] == ["step_000012.jsonl"]


def test_tokens_come_back_as_they_were_written(tmp_path: Path) -> None:
    table = TokenTable(texts=("a\u2028", "\ufffd", ""), numbers={"sampler": (-0.5, -math.inf, 0.0), "advantage": (1.0, 2.0, 3.0)})
    turns = (SampleTurn(number=0, heard="", text="a", reward=0.5), SampleTurn(number=3, heard="\u2028", text="b", reward=math.inf))
    rows = [replace(_row("a\u2028b\x85", "c\nd", math.inf), group=7, parts={"format": 0.5}, tokens=table, episode=0, turns=turns), _row()]
    path = write_rows(tmp_path, 1, rows)
    assert read_rows(path) == rows
    assert "tokens" not in json.loads(path.read_text(encoding="utf-8").split("\n")[1])  # files without them are those of before


@pytest.mark.parametrize(
    "tokens",
    [
        {"texts": ["a"], "numbers": {"sampler": [1.0, 2.0]}},
        {"texts": ["a"], "numbers": [1.0]},
        {"texts": ["a"], "numbers": {"sampler": ["x"]}},
        {"numbers": {}},
        "a",
    ],
)
def test_damaged_tokens_are_an_error_with_file_and_line(tmp_path: Path, tokens: object) -> None:
    path = write_rows(tmp_path, 1, [_row()])
    record = json.loads(path.read_text())
    path.write_text(path.read_text() + json.dumps(record | {"tokens": tokens}) + "\n")
    with pytest.raises(DataError, match=r"step_000001.jsonl:2: not a sample rollout"):
        read_rows(path)


def test_cells_are_one_line_short_and_harmless() -> None:
    assert cell("a\nb\tc\x1b[2Jd", 80) == "a⏎b⇥c�[2Jd"
    assert cell("0123456789abcdef", 10) == "012345…def"  # 9 characters are kept, two thirds of them from the start
    assert cell("0123456789", 10) == "0123456789"


def test_plain_table_has_every_row_and_keeps_to_its_width() -> None:
    text = plain_table(3, [_row(), _row("[red]x[/red]", "word " * 60, -0.5)], 200, width=80)
    lines = text.splitlines()
    assert lines[0] == "samples of step 3"
    assert max(len(line) for line in lines) <= 80
    assert "  1.00   stop" in text and " -0.50   stop" in text
    assert "[red]x[/red]" in text  # no markup
    assert "\x1b" not in text


def test_markdown_cells_cannot_break_out() -> None:
    last = markdown_table([_row("a|b", "`<script>`")], 80).splitlines()[-1]
    assert last == "| 1.000 | stop | `a¦b` | `'<script>'` |"
