"""What runs of agents cannot be combined with."""

from __future__ import annotations

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.online_distill import TrainOnlineDistillation
from aligner.algorithms.online_dpo import TrainOnlineDPO
from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.rejection_sampling import TrainRejectionSampling
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.errors import ConfigError
from aligner.models.config import ModelConfig
from aligner.rollout.config import RolloutConfig

PLAYED = {"environment": EnvironmentConfig(kind=EnvironmentKind.command, command=["agent"])}


@pytest.mark.parametrize("recipe", [TrainGRPO, TrainPPO, TrainRejectionSampling])
def test_who_learns_from_sessions(recipe: type) -> None:
    assert recipe(model=ModelConfig(images=True), **PLAYED).environment.asks_endpoint


@pytest.mark.parametrize("recipe", [TrainOnlineDPO, TrainOnlineDistillation])
def test_who_does_not(recipe: type) -> None:
    said = "environment.kind=command: a session may be several rows, .* allowed: with grpo, ppo, rejection_sampling"
    with pytest.raises(ConfigError, match=said):
        recipe(**PLAYED)


def test_an_engine_that_answers_nobody() -> None:
    said = "rollout.engine=tensorrt_llm: answers no requests from outside, as environment.kind=command .* allowed: megatron, vllm, auto"
    with pytest.raises(ConfigError, match=said):
        TrainGRPO(rollout=RolloutConfig(engine="tensorrt_llm"), **PLAYED)
