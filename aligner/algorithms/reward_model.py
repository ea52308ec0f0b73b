"""Training a reward model on pairs of responses: Bradley-Terry (Ouyang et al. 2022, 2203.02155, step 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from aligner.cluster.run_directory import REWARD_MODEL
from aligner.data.collate import PreferencePair, preference_batch
from aligner.data.config import PreferenceDataConfig
from aligner.data.supervised import load_preferences, require_margins
from aligner.errors import ConfigError, check_numbers
from aligner.loop.epochs import BatchConfig, EpochTraining
from aligner.loop.loop import Algorithm, Built
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.planner.workload import Head
from aligner.protocols import Loss, Trainable
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, Traits, check_pooling, reading
from aligner.types import LabeledBatch, PreferenceBatch

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(BatchConfig):
    """Settings of reward-model training."""

    reports = ("validation/accuracy", "validation/margin")  # of a validation
    loss: BradleyTerry = BradleyTerry.standard  # what an annotated margin does: nothing, shift the difference, or weight the loss
    pooling: Pooling = Pooling.last  # what of a sequence is scored: its last token, or the mean over its tokens
    centre_coef: float = 0.0  # of (score_chosen + score_rejected)^2, which keeps scores near 0

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        if self.pooling is Pooling.tokens:
            raise ConfigError("algorithm.pooling=tokens: pairs are of whole responses; allowed: last, mean")
        check_numbers(self, "algorithm", not_negative=("centre_coef",))


class ScoreModel(Trainable, Protocol):
    """A trainable model with K scores per sequence."""

    def scores(self, batch: PreferenceBatch | LabeledBatch) -> Tensor:
        """Float32 [B, K]."""


class RewardModelTraining(EpochTraining[RewardModelConfig, PreferencePair, PreferenceBatch, ScoreModel]):
    """The algorithm over its parts, on every rank. Raises DataError if the loss is of margins and no training pair has one."""

    def check(self) -> None:
        if self.config.loss is not BradleyTerry.standard:
            require_margins(self.train, f"algorithm.loss={self.config.loss.value}")

    @property
    def loss(self) -> Loss[PreferenceBatch]:
        return partial(bradley_terry_loss, variant=self.config.loss, centre_coef=self.config.centre_coef)

    def collate(self, examples: Sequence[PreferencePair]) -> PreferenceBatch:
        return preference_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Share of validation pairs whose chosen response scores higher, and the mean margin."""
        if not self.validation:
            return {}
        right, margin = 0, 0.0
        for batch in self.held_out():
            scores = self.model.scores(batch)[:, 0].double()
            difference = scores[0::2] - scores[1::2]
            right += int((difference > 0).sum())
            margin += difference.sum().item()
        return {"validation/accuracy": right / len(self.validation), "validation/margin": margin / len(self.validation)}


COLUMNS = (
    Column("loss", "reward/loss", ".4f", Goal.lowest),
    Column("accuracy", "reward/accuracy", "percent", Goal.highest),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainRewardModel(TrainerRun):
    """Training a reward model on pairs (conf/reward_model/reward_model.yaml)."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: RewardModelConfig = field(default_factory=RewardModelConfig)
    read = reading(load_preferences)

    def __post_init__(self) -> None:
        TrainerRun.__post_init__(self)
        check_pooling(self.algorithm.pooling, self.model)

    def traits(self) -> Traits:
        return self.batch_traits(unit=2, head=Head.scalar)


def build_training(job: TrainerJob[Any], training: Callable[..., Algorithm], load: Any, head: ScalarHead, **more: Any) -> Built:
    """`training` of a model with this head, on the examples that `load` reads; `more`: what else it is made with."""
    train, validation = job.load(load)
    model = job.reward_model(head)
    job.describe(train, model.model)
    algorithm = training(job.config.algorithm, model, train=train, validation=validation, **more, **job.common)
    return Built(algorithm=algorithm, model=model.model, checkpoint=REWARD_MODEL)


def build(job: TrainerJob[TrainRewardModel]) -> Built:
    return build_training(job, RewardModelTraining, load_preferences, ScalarHead(pooling=job.config.algorithm.pooling))


RECIPE = Recipe(name="reward_model", config=TrainRewardModel, build=build, columns=COLUMNS)
