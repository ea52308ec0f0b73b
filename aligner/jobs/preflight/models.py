"""The models of a job's components, as the checks of tokenizers and of weights see them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aligner.jobs.programs import Job
from aligner.models.config import ModelConfig
from aligner.schemas import ConstitutionalAI, OnlineRun, TrainPPO, TrainRewardModel, WritingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """A model that a component loads."""

    component: str
    key: str  # of its settings
    config: ModelConfig
    is_scalar: bool  # has one number per token instead of logits
    needs_head: bool  # a scalar head that is not in the files would be random, and never be trained
    reads_text: bool = False  # it is sent texts, not token ids: its tokenizer may be another one


def used_models(config: Job) -> list[UsedModel]:
    """Every model that a component of this job loads, the trained one first; where a reward is a function, its tokenizer's."""
    scores = isinstance(config, WritingRun) and config.scores
    rewards = scores or isinstance(config, TrainRewardModel)
    name = "actor" if isinstance(config, OnlineRun) else "trainer"
    found = [UsedModel(component=name, key="model", config=config.model, is_scalar=rewards, needs_head=scores)]
    if isinstance(config, ConstitutionalAI) and config.judge.path:
        judge = replace(config.model, path=config.judge.path, tokenizer="")
        found.append(UsedModel(component="judge", key="judge", config=judge, is_scalar=False, needs_head=False, reads_text=True))
    if not isinstance(config, OnlineRun):
        return found
    if isinstance(config, TrainPPO):
        own = config.critic.model.or_else(config.model)
        found.append(UsedModel(component="critic", key="critic.model", config=own, is_scalar=True, needs_head=False))
    reward = config.reward
    if reward.serve and not reward.function.function:
        found.append(UsedModel(component="reward", key="reward.model", config=reward.model, is_scalar=True, needs_head=True))
    return found
