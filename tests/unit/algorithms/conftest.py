"""`fakes` of tests/fakes, and an online task made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import fake_parts
import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.run.session import Session


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module tests/fakes/fake_parts.py."""
    return fake_parts


@pytest.fixture
def session(topology, tmp_path: Path) -> Session:
    """Of a run that has just begun."""
    return Session(topology=topology, directory=RunDirectory(tmp_path / "run").create(), config_yaml="run: {}\n")


@pytest.fixture
def make_task(topology, fakes) -> Callable:
    """`make_task(log, num_prompts, batch_size, held_out, **fields)`: an OnlineTask whose reward is the prompt's id, in the data's order.

    `held_out`: fields of its `Validation`; `fields`: its own, or fields of its `Scorers`.
    """
    from aligner.data.order import EpochSampler
    from aligner.models.training.guard import GuardConfig
    from aligner.online.collect import Scorers
    from aligner.online.task import OnlineTask, Validation

    def make(log: list[str], num_prompts: int = 4, batch_size: int = 4, **fields):
        prompts = [fakes.prompt(number) for number in range(num_prompts)]
        parts = {
            "engine": fakes.FakeEngine(log),
            "reference": fakes.FakePolicy([], level=-1.5),
            "topology": topology,
            "train": prompts,
            "order": EpochSampler(num_prompts, batch_size, seed=1, shuffle=False),
            "decode": str,
            "seed": 3,
            "max_response_length": 8,
        }
        judges = {
            "reward": fakes.FakeReward(lambda r: float(r.prompt.id)),
            "pad_id": 9,
            "non_finite": fields.get("guard", GuardConfig()).reward,
        }
        judges |= {name: fields.pop(name) for name in ("reward", "shared", "heartbeat") if name in fields}
        validation = Validation(**{"prompts": prompts[:2], "sampling": "greedy"} | fields.pop("held_out", {}))
        return OnlineTask(judges=Scorers(**judges), validation=validation, **(parts | fields))

    return make
