"""What several tests of rollouts need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import rollout_parts

from aligner.types import Prompt


@pytest.fixture
def mixed_prompts() -> list[Prompt]:
    return rollout_parts.mixed_prompts()


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The world of TensorRT-LLM's stand-in, of version 1.2.1 unless the test says otherwise."""
    from fake_tensorrt_llm import installed

    # What the engine sets for the process's life goes with it.
    with patch.dict(os.environ), installed(getattr(request, "param", "1.2.1"), tmp_path) as world:
        yield world
