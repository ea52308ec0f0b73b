"""Rewards for the length of a response, in tokens, words or characters. Combine them with a reward for the content."""

from __future__ import annotations

import math
from collections.abc import Callable

from aligner.rewards.forms import Factory, OnSamples, Sample

_UNITS: dict[str, Callable[[Sample], int]] = {
    "tokens": lambda sample: len(sample.rollout.response),  # with the end-of-sequence token
    "words": lambda sample: len(sample.response.split()),
    "characters": lambda sample: len(sample.response),
}


@Factory
def target(length: float, reach: float, unit: str = "tokens") -> OnSamples:
    """Factory: 1 for a response of exactly `length`, falling linearly to 0 at `reach` away from it."""
    _positive(length=length, reach=reach)
    return _of_length(unit, lambda measured: max(0.0, 1 - abs(measured - length) / reach))


@Factory
def brevity(limit: float, unit: str = "tokens") -> OnSamples:
    """Factory: from 1 for an empty response linearly to 0 for `limit` and more."""
    _positive(limit=limit)
    return _of_length(unit, lambda measured: max(0.0, 1 - measured / limit))


@Factory
def overlong(limit: float, buffer: float, unit: str = "tokens") -> OnSamples:
    """Factory: 0 up to `limit - buffer`, from there linearly to -1 at `limit` and above (DAPO, https://arxiv.org/abs/2503.14476, 13)."""
    _positive(limit=limit, buffer=buffer)
    if buffer > limit:
        raise ValueError(f"buffer is {buffer}, expected at most limit={limit}")
    return _of_length(unit, lambda measured: min(0.0, max(-1.0, (limit - buffer - measured) / buffer)))


def _of_length(unit: str, credit: Callable[[int], float]) -> OnSamples:
    if unit not in _UNITS:
        raise ValueError(f"unit is {unit!r}, expected one of {', '.join(_UNITS)}")
    return OnSamples(lambda samples: [credit(_UNITS[unit](sample)) for sample in samples])


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, expected a finite number above 0")
