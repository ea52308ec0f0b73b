"""Tokens as the studio colors them."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("nicegui", reason="nicegui is not installed")
from aligner.studio.samples import TOKENS_A_LINE, derived, lines
from aligner.types import TokenTable


def test_gaps_and_ratios_are_derived() -> None:
    table = TokenTable(texts=("a", "b"), numbers={"sampler": (-1.0, -2.0), "trainer": (-1.5, -2.0), "reference": (-1.0, -4.0)})
    numbers = derived(table)
    assert numbers["gap"] == [0.5, 0.0] and numbers["KL to the reference"] == [-0.5, 2.0]
    assert list(derived(TokenTable(texts=("a",), numbers={}))) == ["none"]


def test_lines_end_at_breaks_and_are_short_enough_to_scroll() -> None:
    texts = ["word "] * 100 + ["end\n", "more"]
    found, low, high = lines(texts, {"value": [float(i) for i in range(102)]}, "value")
    assert [len(line) for line in found] == [TOKENS_A_LINE, 101 - TOKENS_A_LINE, 1] and (low, high) == (0.0, 101.0)
    assert "".join(token["t"] for line in found for token in line) == "".join(texts)
    assert found[0][0] == {"t": "word ", "c": "#f0c566", "n": "value 0"} and found[-1][0]["c"] == "#66aad1"


def test_numbers_that_are_not_finite_have_no_color() -> None:
    found, low, high = lines(["a", "b", "c"], {"x": [math.nan, 1.0, 3.0]}, "x")
    assert [token["c"] for token in found[0]] == ["#ffffff", "#f0c566", "#66aad1"] and (low, high) == (1.0, 3.0)
    assert {token["c"] for token in lines(["a", "b"], {"x": [2.0, 2.0]}, "x")[0][0]} == {"#ffffff"}
