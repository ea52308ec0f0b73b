"""What the settings of a component must be, given its model's sizes. Pure.

Each component asks at its start, before it reads data or weights, and `aligner plan` asks for all of them: what the one refuses the other
refuses in the same words.
"""

from __future__ import annotations

from aligner.errors import ConfigError
from aligner.jobs.programs import Trainer
from aligner.models.config import Architecture, ModelConfig
from aligner.models.divisible import check_divisible, check_together
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig, check_engine
from aligner.schemas import ConstitutionalAI, Generate, OnlineRun, TrainPPO, TrainSelfRewarding, TrainSPIN, TrainSteerLM2, WritingRun


def check_actor(config: OnlineRun, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError where `num_ranks` ranks cannot sample and train as the run's settings say."""
    _check_layout(config.model, config.parallel, architecture, num_ranks)
    _check_engine(config.rollout, config.parallel, architecture, num_ranks)
    setting = "batch_size" if isinstance(config, (TrainSPIN, TrainSelfRewarding)) else "mini_batch_size"
    _check_replicas(setting, config.algorithm.mini_batch_size, num_ranks // config.parallel.replica_size)


def check_critic(config: TrainPPO, model: ModelConfig, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError where the critic, whose model is `model`, cannot be laid out, or has too few rollouts for its replicas."""
    _check_layout(model, config.critic.parallel, architecture, num_ranks)
    rows, size, dp = config.algorithm.rollouts_per_step, config.critic.mini_batch_size, num_ranks // config.critic.parallel.replica_size
    smallest = rows % size or size  # the last one may be smaller
    if smallest < dp:
        raise ConfigError(
            f"critic.mini_batch_size={size}: the last mini-batch of {rows} rollouts has {smallest}, "
            f"fewer than the critic's {dp} data-parallel replicas"
        )


def check_reward_model(config: OnlineRun, model: ModelConfig, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError where the served reward model `model` cannot be laid out."""
    _check_layout(model, config.reward.parallel, architecture, num_ranks)


def check_trainer(config: Trainer, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError where `num_ranks` ranks cannot train on the run's data as its settings say."""
    _check_layout(config.model, config.parallel, architecture, num_ranks)
    if not isinstance(config, TrainSteerLM2):  # its batches are of prompts, each with several responses
        _check_replicas("batch_size", config.algorithm.batch_size, num_ranks // config.parallel.replica_size)


def check_writer(config: WritingRun, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError where `num_ranks` ranks cannot sample or compute what the run writes."""
    _check_layout(config.model, config.parallel, architecture, num_ranks)
    samples = isinstance(config, Generate) or (isinstance(config, ConstitutionalAI) and config.algorithm.samples_per_chain > 0)
    if samples:
        _check_engine(config.rollout, config.parallel, architecture, num_ranks)


def _check_layout(model: ModelConfig, parallel: ParallelConfig, architecture: Architecture, num_ranks: int) -> None:
    parallel.check_world(num_ranks)  # first, as in a run, whose ranks meet before its model is looked at
    check_divisible(architecture, parallel)
    check_together(architecture, model, parallel)


def _check_engine(rollout: RolloutConfig, parallel: ParallelConfig, architecture: Architecture, num_ranks: int) -> None:
    check_engine(rollout, architecture, tp=rollout.tp or parallel.tp, world_size=num_ranks)


def _check_replicas(setting: str, size: int, num_replicas: int) -> None:
    if size < num_replicas:
        raise ConfigError(f"algorithm.{setting}={size}: smaller than the {num_replicas} data-parallel replicas")
