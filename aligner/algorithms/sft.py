"""Supervised fine-tuning: cross-entropy of the response tokens (Ouyang et al. 2022, 2203.02155, step 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.config import SFTDataConfig
from aligner.data.supervised import load_supervised
from aligner.errors import ConfigError, check_numbers
from aligner.loop.epochs import BatchConfig, EpochTraining, mean_loss
from aligner.loop.loop import Built
from aligner.losses.sft import sft_loss
from aligner.protocols import Loss, Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, reading
from aligner.types import LabeledBatch

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class SFTConfig(BatchConfig):
    """Settings of supervised fine-tuning."""

    reports = ("validation/loss",)  # of a validation
    batch_size: int = 128  # examples per update
    validation_batch_size: int = 128  # examples per forward batch of a validation
    neftune_alpha: float = 0.0  # uniform noise of alpha / sqrt(tokens of the row * width) on training embeddings (2310.05914); 0: off

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        check_numbers(self, "algorithm", not_negative=("neftune_alpha",))


class SFT(EpochTraining[SFTConfig, SupervisedExample, LabeledBatch, Policy]):
    @property
    def loss(self) -> Loss[LabeledBatch]:
        return sft_loss

    def collate(self, examples: Sequence[SupervisedExample]) -> LabeledBatch:
        return supervised_batch(examples, self.pad_id)

    def validate(self) -> Mapping[str, float]:
        """Mean token cross-entropy on the validation examples."""
        return mean_loss(self.model, self.held_out())


COLUMNS = (
    Column("loss", "sft/loss", ".4f", Goal.lowest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainSFT(TrainerRun):
    """Supervised fine-tuning (conf/sft/sft.yaml)."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    algorithm: SFTConfig = field(default_factory=SFTConfig)
    read = reading(load_supervised)

    def __post_init__(self) -> None:
        TrainerRun.__post_init__(self)
        if self.algorithm.neftune_alpha and self.model.share_prompts:
            raise ConfigError(
                f"algorithm.neftune_alpha={self.algorithm.neftune_alpha}: not with model.share_prompts=true, because every row has noise "
                "of its own on its prompt; allowed: 0"
            )


def build(job: TrainerJob[TrainSFT]) -> Built:
    train, validation = job.load(load_supervised)
    policy = job.policy(neftune_alpha=job.config.algorithm.neftune_alpha)
    job.describe(train, policy.model)
    return Built(algorithm=SFT(job.config.algorithm, policy, train=train, validation=validation, **job.common), model=policy.model)


RECIPE = Recipe(name="sft", config=TrainSFT, build=build, columns=COLUMNS)
