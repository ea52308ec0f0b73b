"""num_processes against the ranks that were started."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from aligner.algorithms.registry import composed
from aligner.errors import ConfigError
from aligner.parallel import launch
from aligner.parallel.launch import LaunchSource, World
from aligner.run import session

NAMED = {"": "num_processes=2: ", "critic": "critic.num_processes=3: ", "reward": "reward.num_processes=4: "}


class Started(Exception):
    """The check let it pass."""


@cache  # a composition takes a second
def config_of(*settings: str) -> Any:
    models = ["model.path=x", "critic.model.path=x", "reward.model.path=x"]
    return composed("ppo", [*models, "reward.serve=true", "data.train=x", *settings])


def begin(monkeypatch: pytest.MonkeyPatch, component: str, num_ranks: int, *settings: str) -> None:
    config = config_of(*settings)
    world = World(rank=0, world_size=num_ranks, local_rank=0, local_world_size=num_ranks, source=LaunchSource.torchrun)

    def initialize(*_: object, **__: object) -> World:
        raise Started

    monkeypatch.setattr(session, "watch_lease", lambda environ: None)
    monkeypatch.setattr(session, "launch", SimpleNamespace(detect_world=lambda environ: (world, None), initialize=initialize))
    with session.open_session(config, config.run, config.parallel, component=component or "actor"):
        pass


@pytest.mark.parametrize("component", NAMED)
def test_other_ranks_than_num_processes_are_refused_before_they_meet(monkeypatch: pytest.MonkeyPatch, component: str) -> None:
    given = ("num_processes=2", "critic.num_processes=3", "reward.num_processes=4")
    with pytest.raises(ConfigError, match=f"^{NAMED[component]}1 rank was started; start . .*, or set .*num_processes=1$"):
        begin(monkeypatch, component, 1, *given)
    with pytest.raises(ConfigError, match=f"^{NAMED[component]}6 ranks were started"):
        begin(monkeypatch, component, 6, *given)
    with pytest.raises(Started):
        begin(monkeypatch, component, {"": 2, "critic": 3, "reward": 4}[component], *given)


def test_the_default_names_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun --nproc-per-node 8 ...` needs no num_processes."""
    for num_ranks in (1, 8):
        with pytest.raises(Started):
            begin(monkeypatch, "", num_ranks)


def test_mpi_tells_the_number_when_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = composed("sft", ["model.path=x", "data.train=x", "num_processes=2"])
    met = World(rank=0, world_size=4, local_rank=0, local_world_size=4, source=LaunchSource.mpi)
    monkeypatch.setattr(session, "watch_lease", lambda environ: None)
    monkeypatch.setattr(launch, "detect_world", lambda environ: (None, None))
    monkeypatch.setattr(launch, "initialize", lambda *_, **__: met)
    with (
        pytest.raises(ConfigError, match="^num_processes=2: 4 ranks were started"),
        session.open_session(config, config.run, config.parallel, component="sft"),
    ):
        pass
