"""The stand-ins of tests/fakes, and the prompts of several tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from aligner.types import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fakes"))


@pytest.fixture
def mixed_prompts() -> list[Prompt]:
    """Six prompts of 1 to 23 tokens: two are the same, and one begins like them."""
    generator = torch.Generator().manual_seed(12)
    rows = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in (3, 22, 1, 9, 22, 6)]
    rows[4], rows[5] = rows[1], rows[1][:17] + rows[5]
    return [Prompt(id=number, tokens=tuple(row), source=f"prompt {number}") for number, row in enumerate(rows)]
