"""What every run has: where it lives, its model and layout, how it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aligner.algorithms.loop import LoopConfig
from aligner.cluster.slurm.config import SlurmConfig
from aligner.errors import ConfigError
from aligner.models.checkpoint_config import CheckpointConfig, DamagedCheckpoint
from aligner.models.config import ModelConfig
from aligner.models.guard import GuardConfig
from aligner.models.optimizer import OptimizerConfig
from aligner.models.scalar_head import Pooling
from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig
from aligner.reporting.config import LoggingConfig


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Where a run lives and how its processes meet."""

    directory: str = "runs/default"  # checkpoints, logs, metrics and registrations; the same directory again resumes the run
    seed: int = 1  # from 0 to 2^63 - 1
    export_hf: bool = True  # write the final policy as a Hugging Face model to <directory>/export
    damaged_checkpoint: DamagedCheckpoint = DamagedCheckpoint.fall_back  # on the newest intact one, the other set aside; or the run ends
    allow_changes: bool = False  # resume with settings that make it another experiment than the checkpoint's
    start_timeout_seconds: float = 300.0  # until all ranks of a component have met
    collective_timeout_seconds: float = 1800.0
    stall_timeout_seconds: float = 1200.0  # a component without any progress for so long writes its stacks and ends; 0: never
    num_threads: int = 0  # of each process; 0: OMP_NUM_THREADS, else what torch chooses

    def __post_init__(self) -> None:
        if not self.directory:
            raise ConfigError("run.directory='': name a directory")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"run.seed={self.seed}: must be from 0 to {2**63 - 1}")
        for name in ("start_timeout_seconds", "collective_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"run.{name}={getattr(self, name)}: must be above 0")
        if not 0 <= self.stall_timeout_seconds < self.collective_timeout_seconds:
            raise ConfigError(
                f"run.stall_timeout_seconds={self.stall_timeout_seconds}: must be below "
                f"run.collective_timeout_seconds={self.collective_timeout_seconds}, which ends ranks without naming the slow one (0: off)"
            )


@dataclass(kw_only=True, slots=True)
class JobRun:
    """What every job has; each kind adds its `data` and its `algorithm`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    num_processes: int = 1  # ranks (of an online run: of the actor), however they are started


@dataclass(kw_only=True, slots=True)
class TrainerRun(JobRun):
    """What every run that trains `model` has."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def check_pooling(pooling: Pooling, model: ModelConfig) -> None:
    """Raise ConfigError for a mean over tokens some of which are computed once for several rows."""
    if pooling is Pooling.mean and model.share_prompts:
        raise ConfigError("algorithm.pooling=mean: needs model.share_prompts=false: the prompt's tokens count in every row")


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
