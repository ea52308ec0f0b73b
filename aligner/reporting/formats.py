"""Numbers for people: short, with units, the same width from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from aligner.errors import ConfigError

T = TypeVar("T")
_BARS = "▁▂▃▄▅▆▇█"


class Goal(str, Enum):
    """Which value of a metric is best."""

    highest = "highest"
    lowest = "lowest"
    none = "none"


def count(value: float) -> str:
    """`12`, `1.2k`, `3.4M`, `5.6G`: three significant digits."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            scaled = value / factor
            return f"{scaled:.0f}{suffix}" if abs(scaled) >= 100 else f"{scaled:.1f}{suffix}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def seconds(value: float) -> str:
    """`12 ms`, `3.4 s`, `2m05s`, `1h02m`, `3d04h`."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


_UNITS = {
    "count": count,
    "seconds": seconds,
    "percent": lambda value: f"{100 * value:.1f}%",
    "tokens/s": lambda value: f"{count(value)} tok/s",
}


def number(value: float, form: str) -> str:
    """`value` in the form of a `Column`; NaN and infinities in words. Raises ConfigError: `form` is neither a unit nor a Python format."""
    if not math.isfinite(value):
        return str(value)
    if form in _UNITS:
        return _UNITS[form](value)
    try:
        return format(float(value), form)
    except ValueError:
        raise ConfigError(f"format {form!r}; allowed: {', '.join(_UNITS)} or a Python float format such as '.3f'") from None


@dataclass(frozen=True, slots=True)
class Column:
    """One shown metric: `metric` is its name; `format` a unit (count, seconds, percent, tokens/s) or a Python float format."""

    label: str
    metric: str
    format: str = ".3f"
    goal: Goal = Goal.none

    def __post_init__(self) -> None:
        number(1.0, self.format)

    def text(self, value: float) -> str:
        return number(value, self.format)

    def best(self, values: Sequence[float]) -> float | None:
        """The best finite value; None without a goal or a finite value."""
        finite = [value for value in values if math.isfinite(value)]
        if self.goal is Goal.none or not finite:
            return None
        return max(finite) if self.goal is Goal.highest else min(finite)


def stretches(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most so many stretches of equal length."""
    size = min(most, len(values))
    return [values[i * len(values) // size : (i + 1) * len(values) // size] for i in range(size)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters: means of equal stretches, scaled from lowest to highest; `x`: NaN."""
    means = [sum(stretch) / len(stretch) for stretch in stretches(values, width)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low
    bars = []
    for mean in means:
        level = (mean - low) / span * (len(_BARS) - 1) if span and math.isfinite(mean) else len(_BARS) // 2 - 1
        bars.append(_BARS[round(level)] if math.isfinite(mean) else "x")
    return "".join(bars)
