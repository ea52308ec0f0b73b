"""Runs that train on data that is there beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.algorithms import (
    distillation,
    process_reward_model,
    regression_reward_model,
    reward_model,
    sft,
    steerlm2,
)
from aligner.algorithms.distillation import DistillationConfig
from aligner.algorithms.dpo import DPOConfig
from aligner.algorithms.kto import KTOConfig
from aligner.algorithms.process_reward_model import ProcessRewardModelConfig
from aligner.algorithms.regression_reward_model import RegressionConfig
from aligner.algorithms.reward_model import RewardModelConfig
from aligner.algorithms.sft import SFTConfig
from aligner.algorithms.steerlm2 import SteerLM2Config
from aligner.data.config import (
    DistillationDataConfig,
    PreferenceDataConfig,
    ProposalDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from aligner.data.reward_config import RegressionDataConfig, StepDataConfig
from aligner.schemas.runs import TrainerRun, check_best_metric, check_pooling


@dataclass(kw_only=True, slots=True)
class TrainSFT(TrainerRun):
    """Supervised fine-tuning (conf/sft.yaml)."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    algorithm: SFTConfig = field(default_factory=SFTConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=sft.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainRewardModel(TrainerRun):
    """Training a reward model on pairs (conf/reward_model.yaml)."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: RewardModelConfig = field(default_factory=RewardModelConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=reward_model.REPORTS, validation=self.data.validation)
        check_pooling(self.algorithm.pooling, self.model)


@dataclass(kw_only=True, slots=True)
class TrainRegressionRewardModel(TrainRewardModel):
    """Training a reward model on attributes with numbers (conf/regression_reward_model.yaml)."""

    data: RegressionDataConfig = field(default_factory=RegressionDataConfig)
    algorithm: RegressionConfig = field(default_factory=RegressionConfig)

    def __post_init__(self) -> None:
        check_pooling(self.algorithm.pooling, self.model)
        found = regression_reward_model.reports(self.data.attributes)
        check_best_metric(self.checkpoint, self.loop, reports=found, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainProcessRewardModel(TrainRewardModel):
    """Training a reward model on the steps of responses (conf/process_reward_model.yaml)."""

    data: StepDataConfig = field(default_factory=StepDataConfig)
    algorithm: ProcessRewardModelConfig = field(default_factory=ProcessRewardModelConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=process_reward_model.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainDPO(TrainerRun):
    """Direct preference optimisation on pairs (conf/dpo.yaml)."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: DPOConfig = field(default_factory=DPOConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=self.algorithm.reports, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainKTO(TrainerRun):
    """Kahneman-Tversky optimisation on responses that are judged one by one (conf/kto.yaml)."""

    data: UnpairedDataConfig = field(default_factory=UnpairedDataConfig)
    algorithm: KTOConfig = field(default_factory=KTOConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=self.algorithm.reports, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainDistillation(TrainerRun):
    """Distillation from a teacher's stored log-probs (conf/distill.yaml)."""

    data: DistillationDataConfig = field(default_factory=DistillationDataConfig)
    algorithm: DistillationConfig = field(default_factory=DistillationConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=distillation.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainSteerLM2(TrainerRun):
    """SteerLM 2 (conf/steerlm2.yaml)."""

    data: ProposalDataConfig = field(default_factory=ProposalDataConfig)
    algorithm: SteerLM2Config = field(default_factory=SteerLM2Config)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=steerlm2.REPORTS, validation=self.data.validation)
