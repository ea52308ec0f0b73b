"""Runs that learn from the policy's own samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.algorithms import (
    online_distillation,
    spin,
)
from aligner.algorithms.grpo import GRPOConfig
from aligner.algorithms.online_distillation import OnlineDistillationConfig
from aligner.algorithms.online_dpo import OnlineDPOConfig
from aligner.algorithms.ppo import PPOConfig
from aligner.algorithms.rejection_sampling import RejectionSamplingConfig
from aligner.algorithms.self_rewarding import JudgedBy, SelfRewardingConfig
from aligner.algorithms.spin import SPINConfig
from aligner.algorithms.validation import ValidationConfig
from aligner.cluster.config import LocalLauncherConfig
from aligner.data.config import (
    DemonstrationDataConfig,
    PromptDataConfig,
)
from aligner.environments.config import EnvironmentConfig
from aligner.errors import ConfigError
from aligner.rewards.config import RewardFunctionConfig
from aligner.rollout.config import RolloutConfig
from aligner.schemas.runs import TrainerRun, check_best_metric
from aligner.servers.components import CriticConfig, RewardConfig
from aligner.servers.config import ClientConfig


@dataclass(kw_only=True, slots=True)
class OnlineRun(TrainerRun):
    """What every run that learns from its own samples has."""

    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # responses are then episodes of several turns
    client: ClientConfig = field(default_factory=ClientConfig)
    accuracy: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)  # judges validation responses; empty: no accuracy
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    launcher: LocalLauncherConfig = field(default_factory=LocalLauncherConfig)

    def __post_init__(self) -> None:
        reports = self.validation.reports(has_accuracy=bool(self.accuracy.function))
        missing = "" if self.accuracy.function else "; accuracy, mean@n and pass@k need accuracy.function"
        check_best_metric(self.checkpoint, self.loop, reports=reports, validation=self.data.validation, missing=missing)

    def check_rewarded(self) -> None:
        """Raise ConfigError where nothing gives rewards (the settings of a run may be shown before they are complete)."""
        if self.has_scorer or not self.environment.function:
            self.reward.check_named()
        if self.environment.function and "environment" in self.reward.functions:
            raise ConfigError("reward.functions.environment: so the environment's own reward is named; give it another name")

    @property
    def has_scorer(self) -> bool:
        """Whether a reward function or a reward model scores whole responses, besides an environment."""
        return self.reward.serve or self.reward.has_functions


@dataclass(kw_only=True, slots=True)
class TrainGRPO(OnlineRun):
    """GRPO and its kin (conf/grpo.yaml)."""

    algorithm: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        self.algorithm.shaping.check_length(self.rollout.sampling.longest)


@dataclass(kw_only=True, slots=True)
class TrainOnlineDPO(OnlineRun):
    """DPO on pairs of the policy's own samples (conf/online_dpo.yaml)."""

    algorithm: OnlineDPOConfig = field(default_factory=OnlineDPOConfig)


@dataclass(kw_only=True, slots=True)
class TrainRejectionSampling(OnlineRun):
    """Supervised fine-tuning on the best of the policy's own samples (conf/rejection_sampling.yaml)."""

    algorithm: RejectionSamplingConfig = field(default_factory=RejectionSamplingConfig)


@dataclass(kw_only=True, slots=True)
class UnjudgedRun(OnlineRun):
    """An online run that learns without rewards; where some are configured they are reported."""

    def check_rewarded(self) -> None:
        """Nothing need give rewards. Raises ConfigError where what is to give them is incomplete."""
        if self.has_scorer or self.environment.function:
            OnlineRun.check_rewarded(self)


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """A frozen model of the student's architecture, whose weights wait in host memory."""

    path: str = ""  # required: a Hugging Face directory, or a checkpoint of this project


@dataclass(kw_only=True, slots=True)
class TrainOnlineDistillation(UnjudgedRun):
    """Distillation on the student's own samples (conf/online_distill.yaml)."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: OnlineDistillationConfig = field(default_factory=OnlineDistillationConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=online_distillation.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainSPIN(UnjudgedRun):
    """Self-play fine-tuning (conf/spin.yaml)."""

    data: DemonstrationDataConfig = field(default_factory=DemonstrationDataConfig)
    algorithm: SPINConfig = field(default_factory=SPINConfig)

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=spin.REPORTS, validation=self.data.validation)
        check_iterated(self)


@dataclass(kw_only=True, slots=True)
class TrainSelfRewarding(UnjudgedRun):
    """Self-rewarding, and iterative DPO on rewards (conf/self_rewarding.yaml)."""

    algorithm: SelfRewardingConfig = field(default_factory=SelfRewardingConfig)

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        check_iterated(self)

    def check_rewarded(self) -> None:
        """Rewards need only be named where they are what judges. Raises ConfigError where they are incomplete."""
        if self.algorithm.judge is JudgedBy.reward:
            OnlineRun.check_rewarded(self)
        else:
            UnjudgedRun.check_rewarded(self)


@dataclass(kw_only=True, slots=True)
class TrainPPO(OnlineRun):
    """PPO with its critic and reward components (conf/ppo.yaml)."""

    algorithm: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        self.algorithm.shaping.check_length(self.rollout.sampling.longest)


def check_iterated(config: OnlineRun) -> None:
    """Raise ConfigError for what training in iterations, on pairs of single responses, cannot be combined with."""
    if config.rollout.asynchronous.max_staleness:
        raise ConfigError("rollout.asynchronous.max_staleness: an iteration is sampled before it is trained on; allowed: 0")
    if config.environment.function:
        raise ConfigError(f"environment.function={config.environment.function}: single responses are compared; allowed: none")
