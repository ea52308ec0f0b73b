"""Does a refit reach the engine? Every weight of the policy is negated; samples must then match the negated policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from aligner.models.build import LanguageModel


@contextmanager
def negated(chunks: Sequence[LanguageModel]) -> Iterator[None]:
    """The policy with the sign of all its parameters turned, which is undone to the bit. Not while an engine has the policy's place."""
    _negate(chunks)
    try:
        yield
    finally:
        _negate(chunks)


@torch.no_grad()
def _negate(chunks: Sequence[LanguageModel]) -> None:
    seen: set[int] = set()
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.data_ptr() not in seen:  # a tied one once
                seen.add(parameter.data_ptr())
                parameter.neg_()
