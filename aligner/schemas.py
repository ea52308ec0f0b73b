"""The root config of every entry point: one dataclass per kind of run, made of the sections that the packages define.

A PPO run has one config for all of its components, so that the actor and its servers cannot disagree. Light: imports no Megatron-Core, no
PyTriton, no Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aligner.algorithms import reward_model, sft
from aligner.algorithms.dpo import DPOConfig
from aligner.algorithms.grpo import GRPOConfig
from aligner.algorithms.kto import KTOConfig
from aligner.algorithms.loop import LoopConfig
from aligner.algorithms.online_dpo import OnlineDPOConfig
from aligner.algorithms.ppo import PPOConfig
from aligner.algorithms.rejection_sampling import RejectionSamplingConfig
from aligner.algorithms.reward_model import RewardModelConfig
from aligner.algorithms.sft import SFTConfig
from aligner.algorithms.validation import ValidationConfig
from aligner.cluster.config import LocalLauncherConfig
from aligner.cluster.slurm.config import SlurmConfig
from aligner.data.config import PreferenceDataConfig, PromptDataConfig, SFTDataConfig, UnpairedDataConfig
from aligner.environments.config import EnvironmentConfig
from aligner.errors import ConfigError
from aligner.models.checkpoint_config import CheckpointConfig
from aligner.models.config import ModelConfig
from aligner.models.guard import GuardConfig
from aligner.models.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig
from aligner.reporting.config import LoggingConfig
from aligner.rewards.config import NamedRewardConfig, RewardFunctionConfig, check_parts
from aligner.rollout.config import RolloutConfig
from aligner.servers.config import ClientConfig, ServerConfig


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Where a run lives and how its processes meet."""

    directory: str = "runs/default"  # checkpoints, logs, metrics and registrations; the same directory again resumes the run
    seed: int = 1
    export_hf: bool = True  # write the final policy as a Hugging Face model to <directory>/export
    start_timeout_seconds: float = 300.0  # until all ranks of a component have met
    collective_timeout_seconds: float = 1800.0
    stall_timeout_seconds: float = 1200.0  # a component without any progress for so long writes its stacks and ends; 0: never
    num_threads: int = 0  # of each process; 0: OMP_NUM_THREADS, else what torch chooses

    def __post_init__(self) -> None:
        if not self.directory:
            raise ConfigError("run.directory='': name a directory")
        for name in ("start_timeout_seconds", "collective_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"run.{name}={getattr(self, name)}: must be above 0")
        if not 0 <= self.stall_timeout_seconds < self.collective_timeout_seconds:
            raise ConfigError(
                f"run.stall_timeout_seconds={self.stall_timeout_seconds}: must be below "
                f"run.collective_timeout_seconds={self.collective_timeout_seconds}, which ends ranks without naming the slow one (0: off)"
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The critic component of a PPO run: a value model behind a server."""

    model: ModelConfig = field(default_factory=ModelConfig)  # path: usually a reward model's checkpoint
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    num_processes: int = 1  # ranks, however they are started
    clip: float = 0.2  # of the value around the old value; 0: off
    mini_batch_size: int = 128  # rollouts per optimizer step
    num_epochs: int = 1
    accept_gap: bool = False  # let a critic join that was not trained on all that the policy was; else the run ends, saying what is missing

    def __post_init__(self) -> None:
        for name in ("num_processes", "mini_batch_size", "num_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"critic.{name}={getattr(self, name)}: must be at least 1")
        if self.clip < 0:
            raise ConfigError(f"critic.clip={self.clip}: must not be negative (0 is off)")


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """Who scores responses: a Python function (`function.function`), the weighted sum of several (`functions`), or a reward model
    (`model.path`); behind a server with `serve`.
    """

    serve: bool = False  # a component of its own behind PyTriton; else a function in the actor's processes
    function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    functions: dict[str, NamedRewardConfig] = field(default_factory=dict)  # by name, instead of `function`
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    num_processes: int = 1  # ranks, however they are started

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ConfigError(f"reward.num_processes={self.num_processes}: must be at least 1")
        if self.functions and self.function.function:
            raise ConfigError(
                f"reward.function.function={self.function.function} and reward.functions.{', '.join(self.functions)}: give one of the two; "
                "a single function is one of reward.functions too"
            )
        check_parts(self.functions)
        served = [name for name, part in self.functions.items() if part.served]
        if served and not self.serve:
            raise ConfigError(f"reward.functions.{served[0]}.served=true: needs reward.serve=true, and reward.model.path")
        if self.functions and self.serve and not served:
            raise ConfigError(
                f"reward.serve=true: none of reward.functions ({', '.join(self.functions)}) is the reward model; add one with served=true"
            )

    def check_named(self) -> None:
        """Raise ConfigError where nothing says how responses are scored (the settings of a run may be shown before they are complete)."""
        if self.function.function or (self.functions and not self.serve):
            return
        if not self.serve:
            raise ConfigError(
                "reward.function.function='': name a reward function, or set reward.serve=true with reward.model.path to use a reward model"
            )
        if not self.model.path:
            raise ConfigError("reward.model.path='': name the reward model's checkpoint, or a function in reward.function.function")

    @property
    def has_functions(self) -> bool:
        """Whether Python functions or endpoints score responses, alone or beside a reward model."""
        return bool(self.function.function or self.functions)


@dataclass(kw_only=True, slots=True)
class TrainSFT:
    """Supervised fine-tuning (conf/sft.yaml)."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    algorithm: SFTConfig = field(default_factory=SFTConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks, however they are started

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=sft.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainRewardModel:
    """Training a reward model on pairs (conf/reward_model.yaml)."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: RewardModelConfig = field(default_factory=RewardModelConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks, however they are started

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=reward_model.REPORTS, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainDPO:
    """Direct preference optimisation on pairs (conf/dpo.yaml)."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: DPOConfig = field(default_factory=DPOConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks, however they are started

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=self.algorithm.reports, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class TrainKTO:
    """Kahneman-Tversky optimisation on responses that are judged one by one (conf/kto.yaml)."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: UnpairedDataConfig = field(default_factory=UnpairedDataConfig)
    algorithm: KTOConfig = field(default_factory=KTOConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks, however they are started

    def __post_init__(self) -> None:
        check_best_metric(self.checkpoint, self.loop, reports=self.algorithm.reports, validation=self.data.validation)


@dataclass(kw_only=True, slots=True)
class OnlineRun:
    """What every run that learns from its own samples has; each kind adds its `algorithm`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # responses are then episodes of several turns
    client: ClientConfig = field(default_factory=ClientConfig)
    accuracy: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)  # judges validation responses; empty: no accuracy
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launcher: LocalLauncherConfig = field(default_factory=LocalLauncherConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks of the actor, however they are started

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
        self.algorithm.shaping.check_length(self.rollout.sampling.max_response_length)


@dataclass(kw_only=True, slots=True)
class TrainOnlineDPO(OnlineRun):
    """DPO on pairs of the policy's own samples (conf/online_dpo.yaml)."""

    algorithm: OnlineDPOConfig = field(default_factory=OnlineDPOConfig)


@dataclass(kw_only=True, slots=True)
class TrainRejectionSampling(OnlineRun):
    """Supervised fine-tuning on the best of the policy's own samples (conf/rejection_sampling.yaml)."""

    algorithm: RejectionSamplingConfig = field(default_factory=RejectionSamplingConfig)


@dataclass(kw_only=True, slots=True)
class TrainPPO(OnlineRun):
    """PPO with its critic and reward components (conf/ppo.yaml)."""

    algorithm: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        self.algorithm.shaping.check_length(self.rollout.sampling.max_response_length)


def check_best_metric(
    checkpoint: CheckpointConfig, loop: LoopConfig, *, reports: Sequence[str], validation: str, missing: str = ""
) -> None:
    """Raise ConfigError where the best checkpoint is to be kept and no validation can tell which it is.

    `reports` are the metrics that a validation gives, on the data `validation`; `missing` says what others would need.
    """
    metric = checkpoint.best_metric
    if not metric:
        return
    if not loop.validate_every:
        raise ConfigError(f"checkpoint.best_metric={metric}: needs loop.validate_every above 0")
    if not validation:
        raise ConfigError(f"checkpoint.best_metric={metric}: needs data.validation")
    if metric not in reports:
        raise ConfigError(f"checkpoint.best_metric={metric}: validation reports {', '.join(reports)}{missing}")
