"""The models of a job's components, as the checks of tokenizers and of weights see them."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.jobs.programs import Job
from aligner.models.config import ModelConfig
from aligner.schemas import OnlineRun, TrainPPO, TrainRewardModel


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """A model that a component loads."""

    component: str
    key: str  # of its settings
    config: ModelConfig
    is_scalar: bool  # has one number per token instead of logits
    needs_head: bool  # a scalar head that is not in the files would be random, and never be trained


def used_models(config: Job) -> list[UsedModel]:
    """Every model that a component of this job loads, the trained one first; where a reward is a function, its tokenizer's."""
    rewards = isinstance(config, TrainRewardModel)
    name = "actor" if isinstance(config, OnlineRun) else "trainer"
    found = [UsedModel(component=name, key="model", config=config.model, is_scalar=rewards, needs_head=False)]
    if not isinstance(config, OnlineRun):
        return found
    if isinstance(config, TrainPPO):
        own = config.critic.model.or_else(config.model)
        found.append(UsedModel(component="critic", key="critic.model", config=own, is_scalar=True, needs_head=False))
    reward = config.reward
    if reward.serve and not reward.function.function:
        found.append(UsedModel(component="reward", key="reward.model", config=reward.model, is_scalar=True, needs_head=True))
    return found
