"""`fakes` of tests/fakes, and an online task made of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FAKES = Path(__file__).resolve().parents[2] / "fakes" / "fake_parts.py"


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module tests/fakes/fake_parts.py."""
    spec = importlib.util.spec_from_file_location("fake_parts", FAKES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_task(topology, fakes) -> Callable:
    """`make_task(log, num_prompts, batch_size, **fields)`: an OnlineTask whose reward is the prompt's id, in the data's own order."""
    from aligner.data.collate import EpochSampler
    from aligner.online.task import OnlineTask

    def make(log: list[str], num_prompts: int = 4, batch_size: int = 4, **fields):
        prompts = [fakes.prompt(number) for number in range(num_prompts)]
        parts = {
            "engine": fakes.FakeEngine(log),
            "reference": fakes.FakePolicy([], level=-1.5),
            "reward": fakes.FakeReward(lambda r: float(r.prompt.id)),
            "topology": topology,
            "train": prompts,
            "order": EpochSampler(num_prompts, batch_size, seed=1, shuffle=False),
            "validation": prompts[:2],
            "validation_sampling": "greedy",
            "validation_scorer": None,
            "decode": str,
            "pad_id": 9,
            "seed": 3,
            "max_response_length": 8,
        }
        return OnlineTask(**(parts | fields))

    return make
