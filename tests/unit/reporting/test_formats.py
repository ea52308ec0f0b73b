from __future__ import annotations

import math

import pytest

from aligner.errors import ConfigError
from aligner.reporting import formats
from aligner.reporting.formats import Column, Goal


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (12, "12"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.9, "1.0k"),
        (1234, "1.2k"),
        (123456, "123k"),
        (2.5e6, "2.5M"),
        (3e9, "3.0G"),
    ],
)
def test_count(value: float, text: str) -> None:
    assert formats.count(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0.0123, "12 ms"), (0.9996, "1.0 s"), (3.44, "3.4 s"), (59.97, "1m00s"), (125, "2m05s"), (3725, "1h02m"), (273_600, "3d04h")],
)
def test_seconds(value: float, text: str) -> None:
    assert formats.seconds(value) == text


def test_columns() -> None:
    assert Column("reward", "reward/mean").text(0.12345) == "0.123"
    assert Column("acc", "a", "percent").text(0.5) == "50.0%"
    assert Column("", "t", "tokens/s").text(1234.0) == "1.2k tok/s"
    assert Column("kl", "kl").text(math.nan) == "nan"
    with pytest.raises(ConfigError, match="format 'furlongs'; allowed: count, seconds, percent, tokens/s"):
        Column("x", "x", "furlongs")


def test_best_follows_the_goal_and_skips_nan() -> None:
    values = [1.0, math.nan, 3.0, 2.0]
    assert Column("x", "x", goal=Goal.highest).best(values) == 3.0
    assert Column("x", "x", goal=Goal.lowest).best(values) == 1.0
    assert Column("x", "x").best(values) is None
    assert Column("x", "x", goal=Goal.highest).best([math.nan]) is None


def test_sparkline() -> None:
    assert formats.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert formats.sparkline([0, 0, 7, 7], 2) == "▁█"  # means of halves
    assert formats.sparkline([5, 5], 8) == "▄▄"
    assert formats.sparkline([0, math.nan, 1], 8) == "▁x█"
    assert formats.sparkline([], 8) == ""
    assert len(formats.sparkline(list(range(1000)), 30)) == 30
