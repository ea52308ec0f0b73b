"""The stand-ins of tests/fakes, and the prompts of several tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import rollout_parts

from aligner.types import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fakes"))


@pytest.fixture
def mixed_prompts() -> list[Prompt]:
    return rollout_parts.mixed_prompts()
