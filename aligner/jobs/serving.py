"""The server components of a PPO run: critic and reward."""

from __future__ import annotations

from functools import partial

from aligner.errors import ConfigError
from aligner.jobs.checkpointing import CriticCheckpointer, load_critic
from aligner.jobs.parts import check_rollout_length, load_model_files, tokenizer_directory
from aligner.jobs.session import session
from aligner.losses.value import value_loss
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.rewards.load import build_reward_function
from aligner.schemas import TrainGRPO, TrainPPO
from aligner.servers.config import RequestLimits
from aligner.servers.critic import CriticService
from aligner.servers.reward import FunctionRewardService, RewardService
from aligner.servers.server import serve


def serve_critic(config: TrainPPO) -> None:
    """The critic of a PPO run: trains on what the actor sends, until it is told to stop. Every rank calls it."""
    critic = config.critic
    with session(config, config.run, critic.parallel, writes_config=False) as here:
        model_config = _or_actors(critic.model, config.model)
        _, architecture = load_model_files(model_config)
        check_rollout_length(model_config, architecture, config)
        _check_mini_batches(config, here.topology.dp_size)
        updates = -(-config.algorithm.rollouts_per_step // critic.mini_batch_size) * critic.num_epochs
        training = create.training(model_config, critic.optimizer, total_steps=config.loop.max_steps * updates)
        model = create.create_value_model(model_config, architecture, critic.parallel, here.topology, training)
        resumed = load_critic(here, model.model, config.checkpoint)
        here.say(f"critic: resumed after step {resumed}" if resumed else f"critic: starts from {model_config.path or 'random weights'}")
        keeper = CriticCheckpointer(here, model.model, tokenizer=tokenizer_directory(model_config), config=config.checkpoint)
        service = CriticService(
            model,
            partial(value_loss, clip=critic.clip or None),
            mini_batch_size=critic.mini_batch_size,
            num_epochs=critic.num_epochs,
            save=keeper.save,
        )
        limits = RequestLimits(
            vocab_size=architecture.vocab_size,
            max_sequence_length=create.context_length(model_config, architecture),
        )
        serve("critic", service.operations(), config=critic.server, limits=limits, services_dir=here.directory.services)


def serve_reward_model(config: TrainPPO | TrainGRPO) -> None:
    """The reward component of a run: a frozen reward model, or a reward function. Every rank calls it."""
    reward = config.reward
    with session(config, config.run, reward.parallel, writes_config=False) as here:
        reward.check_named()
        is_function = bool(reward.function.function)
        model_config = _or_actors(reward.model, config.model) if is_function else reward.model
        tokenizer, architecture = load_model_files(model_config)
        check_rollout_length(model_config, architecture, config)
        if is_function:
            service = FunctionRewardService(build_reward_function(reward.function), decode=tokenizer.decode)
        else:
            training = create.training(model_config, None)
            model = create.create_reward_model(model_config, architecture, reward.parallel, here.topology, training)
            service = RewardService(model, encode=tokenizer.encode)
        limits = RequestLimits(
            vocab_size=architecture.vocab_size,
            max_sequence_length=create.context_length(model_config, architecture),
        )
        here.say(f"reward: serves {reward.function.function or model_config.path}")
        serve("reward", service.operations(), config=reward.server, limits=limits, services_dir=here.directory.services)


def _or_actors(own: ModelConfig, actors: ModelConfig) -> ModelConfig:
    """A component's own model where it names one, else the actor's."""
    return own if own.path or own.tokenizer else actors


def _check_mini_batches(config: TrainPPO, dp_size: int) -> None:
    """Raise ConfigError where a data-parallel replica of the critic would get no row of a mini-batch; the last one may be smaller."""
    rows = config.algorithm.rollouts_per_step
    smallest = rows % config.critic.mini_batch_size or config.critic.mini_batch_size
    if smallest < dp_size:
        raise ConfigError(
            f"critic.mini_batch_size={config.critic.mini_batch_size}: the last mini-batch of {rows} rollouts has {smallest}, "
            f"fewer than the critic's {dp_size} data-parallel replicas"
        )
