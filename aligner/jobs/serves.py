"""The server components of a PPO run: critic and reward."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from aligner.algorithms.ppo import TrainPPO
from aligner.cluster import lease as leases
from aligner.cluster.component import Placement
from aligner.data.vision import ImageStore, Vision
from aligner.errors import ConfigError
from aligner.jobs.parts import load_model_files, with_lengths, with_steps
from aligner.jobs.sources import create_critic, critic_source, pinned
from aligner.loop.checkpointing import CriticCheckpointer, load_critic
from aligner.losses.value import value_loss
from aligner.models import create
from aligner.models.config import Architecture, ModelConfig
from aligner.models.modules.scalar_head import ScalarHead
from aligner.models.training.trainable import TrainableModel
from aligner.online.config import OnlineRun
from aligner.parallel.collectives import from_rank_0, raise_everywhere
from aligner.parallel.topology import ParallelConfig
from aligner.rewards.forms import OnSamples
from aligner.rewards.load import build_reward_function
from aligner.run.session import Session, announced, open_session
from aligner.servers.components import in_section
from aligner.servers.config import RequestLimits
from aligner.servers.health import Purpose
from aligner.servers.intake import Operation
from aligner.servers.registry import Publication
from aligner.servers.server import Service, serve
from aligner.servers.services import CriticService, FunctionRewardService, RewardService
from aligner.servers.turns import Residence, Turn
from aligner.servers.wire import Payload
from aligner.types import Images, TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """What a component serves: its operations, its models, and what these can read."""

    operations: tuple[Operation, ...]
    models: tuple[TrainableModel, ...]
    limits: RequestLimits
    vision: Vision | None = None


def serve_critic(config: TrainPPO) -> None:
    """The critic of a PPO run: trains on the actor's requests until told to stop. Every rank calls it."""
    critic = config.critic
    if not critic.is_served:
        raise ConfigError(f"critic.kind={critic.kind.value}: the actor's processes have the critic; start no component for it")
    with _opened(config, "critic", critic) as (session, publication):
        source = critic_source(session, config)
        config = with_lengths(config)  # raises if the longest rollout does not fit
        steps = from_rank_0(lambda: with_steps(config).loop.max_steps) if config.loop.epochs else config.loop.max_steps
        config.check_critic(source.config, source.architecture, session.topology.world_size)
        turn = _begin_turn(session, config, "critic", publication)
        model = create_critic(session, config, source, steps=steps)
        damaged = config.run.damaged_checkpoint
        ledger = load_critic(session, model.model, config.checkpoint, accept_gap=critic.accept_gap, damaged=damaged)
        step = ledger.checkpoint_step
        session.say(f"critic: resumed after step {step}" if step else f"critic: starts from {source.config.path or 'random weights'}")
        if publication is not None:
            publication.describe_checkpoint(f"step {step}" if step else source.config.path)
        keeper = CriticCheckpointer(session, model.model, ledger, tokenizer=source.tokenizer_files, config=config.checkpoint)
        service = CriticService(
            model,
            partial(value_loss, clip=critic.clip or None),
            ledger,
            mini_batch_size=critic.mini_batch_size,
            num_epochs=critic.num_epochs,
            save=keeper.save,
        )
        limits = _limits(source.config, source.architecture)
        served = _Served(operations=service.operations(), models=(model.model,), limits=limits, vision=source.tokenizer.vision)
        if critic.with_reward:
            scores = _reward(session, config, critic.parallel)
            served = _Served(
                operations=(*served.operations, *scores.operations),
                models=(*served.models, *scores.models),
                limits=RequestLimits(**{name: min(size, getattr(scores.limits, name)) for name, size in asdict(served.limits).items()}),
                vision=served.vision,
            )
        _serve(session, config, "critic", served, turn, publication)


def serve_reward_model(config: OnlineRun) -> None:
    """The reward component of a run: a frozen reward model, or a reward function. Every rank calls it."""
    if config.reward_service != "reward":
        raise ConfigError(f"critic.with_reward=true: the {config.reward_service} serves the reward; start no component for it")
    with _opened(config, "reward", config.reward) as (session, publication):
        turn = None if config.reward.function.path else _begin_turn(session, config, "reward", publication)
        _serve(session, config, "reward", _reward(session, config, config.reward.parallel), turn, publication)


@contextmanager
def _opened(config: OnlineRun, name: str, section: Any) -> Iterator[tuple[Session, Publication | None]]:
    """The session of the component with this section, and on rank 0 its announcement."""
    with ExitStack() as stack:
        with in_section(name):
            section.server.chosen_transport()  # raises before anything is loaded
            session = stack.enter_context(open_session(config, config.run, section.parallel, component=name, writes_config=False))
        yield session, stack.enter_context(announced(session, name, heartbeat_seconds=section.server.heartbeat_seconds))


def _reward(session: Session, config: OnlineRun, parallel: ParallelConfig) -> _Served:
    """The reward model on this component's ranks, or the reward function."""
    reward = config.reward
    reward.check_named()
    is_function = bool(reward.function.path)
    model_config = reward.model.or_else(config.model) if is_function else pinned(session, "reward.model", reward.model)
    with in_section("reward"):
        tokenizer, architecture = load_model_files(model_config, session=session)
    with_lengths(config)  # raises if the longest rollout does not fit
    models: tuple[TrainableModel, ...] = ()
    if is_function:
        function = build_reward_function(reward.function)
        if isinstance(function, OnSamples):
            raise ConfigError(f"reward.serve=true: {reward.function.path} needs whole samples, but a server receives texts only")
        service = FunctionRewardService(function, name=reward.function.path, decode=tokenizer.decode)
    else:
        config.check_reward(model_config, architecture, session.topology.world_size)
        with in_section("reward"):
            model = create.create_reward_model(
                model_config, architecture, parallel, session.topology, create.training(model_config, None, vision=tokenizer.vision)
            )
        _check_weights(reward.attribute_weights, model.head)
        service = RewardService(model, encode=tokenizer.encode)
        models = (model.model,)
    session.say(f"reward: serves {reward.function.path or model_config.path}")
    vision = None if is_function else tokenizer.vision
    return _Served(operations=service.operations(), models=models, limits=_limits(model_config, architecture), vision=vision)


def _begin_turn(session: Session, config: OnlineRun, name: str, publication: Publication | None) -> Turn | None:
    """Rank 0's turn on GPUs that the components share, taken before a model is made on them. None if they share none."""
    if config.placement is Placement.separate:
        return None
    turn = Turn(session.directory.turn, name)

    def take() -> None:
        assert publication is not None  # on rank 0
        publication.waits(True)
        turn.take(config.server_client.train_timeout_seconds)
        publication.waits(False)

    from_rank_0(take)
    return turn


def _check_weights(weights: Sequence[float], head: ScalarHead) -> None:
    """Raise ConfigError if the model's scores cannot be combined into one reward."""
    if len(weights) != head.num_outputs and (weights or head.num_outputs > 1):
        raise ConfigError(
            f"reward.attribute_weights={list(weights)}: reward.model.path has {head.num_outputs} outputs ({', '.join(head.outputs)}), "
            "allowed: one weight for each" + (", or none" if head.num_outputs == 1 else "")
        )


def with_images(operation: Operation, store: ImageStore) -> Operation:
    """The operation, which rejects a request if an image of its rows is missing or has changed, before a model needs it."""

    def check(payload: Payload) -> None:
        if operation.check is not None:
            operation.check(payload)
        batch = payload if isinstance(payload, TokenBatch) else getattr(payload, "batch", None)
        if batch is not None and Images.name in batch.extras:
            for digest in {digest for row in batch.extras[Images.name].data for digest in Images.digests(row)}:
                store.get(digest)

    return replace(operation, check=check)


def _limits(model: ModelConfig, architecture: Architecture) -> RequestLimits:
    return RequestLimits(vocab_size=architecture.vocab_size, max_sequence_length=create.context_length(model, architecture))


def _serve(session: Session, config: OnlineRun, name: str, served: _Served, turn: Turn | None, publication: Publication | None) -> None:
    """Serve in the run's directory. Models that take turns are away until a request needs them. A standalone server exits by itself."""
    residence = Residence(served.models, turn if session.is_first else None)
    if turn is not None:
        residence.move(False)
        raise_everywhere(None)  # all ranks' are
        residence.release()
    run, settings = session.directory, getattr(config, name).server
    alone = not os.environ.get(leases.VARIABLE)
    with in_section(name):
        service = Service(
            name=name,
            operations=tuple(with_images(operation, served.vision.store) for operation in served.operations)
            if served.vision is not None
            else served.operations,
            config=settings,
            limits=served.limits,
            services_dir=run.services,
            secret=run.secret,
            progress=session.progress,
            publication=publication,
            residence=residence,
            own_tls=config.run.server_tls,
            purpose=Purpose(run.service("actor"), run.done, settings.idle_timeout_seconds) if alone else None,
        )
        serve(service)
