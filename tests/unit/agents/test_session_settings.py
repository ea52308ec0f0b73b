"""What runs of agents cannot be combined with."""

from __future__ import annotations

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.ppo import TrainPPO
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.errors import ConfigError
from aligner.models.config import ModelConfig


def test_who_learns_from_sessions() -> None:
    played = {"environment": EnvironmentConfig(kind=EnvironmentKind.command, command=["agent"])}
    assert TrainGRPO(**played).environment.asks_endpoint
    with pytest.raises(
        ConfigError, match="environment.kind=command: a session may be several rows, which grpo .* learn from; allowed: grpo"
    ):
        TrainPPO(**played)
    with pytest.raises(ConfigError, match="environment.kind=command: model.images=true: .*; allowed: false"):
        TrainGRPO(model=ModelConfig(images=True), **played)
