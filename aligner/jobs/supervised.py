"""The trainers of one component: supervised fine-tuning, reward models, and preference losses on pairs and on single responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from aligner.algorithms.dpo import DPO
from aligner.algorithms.kto import KTO, balance
from aligner.algorithms.reward_model import RewardModelTraining
from aligner.algorithms.sft import SFT
from aligner.cluster.run_directory import POLICY, REWARD_MODEL
from aligner.data.preferences import load_preferences
from aligner.data.report import LoadReport
from aligner.data.supervised import load_supervised
from aligner.data.tokenizer import Tokenizer
from aligner.data.unpaired import load_unpaired
from aligner.jobs import columns
from aligner.jobs.checkpointing import RunCheckpointer
from aligner.jobs.ending import conclude
from aligner.jobs.parts import check_length, export_at_end, load_model_files, run_loop, tokenizer_directory
from aligner.jobs.session import Session, session
from aligner.jobs.sources import pinned
from aligner.models import create
from aligner.models.config import Architecture
from aligner.models.guard import Guard
from aligner.models.policy import ReferencePolicy
from aligner.models.trainable import Training
from aligner.schemas import TrainDPO, TrainKTO, TrainRewardModel, TrainSFT

Example = TypeVar("Example")


def train_sft(config: TrainSFT, *, component: str = "sft") -> int:
    """Supervised fine-tuning. Every rank calls it."""
    with session(config, config.run, config.parallel, component=component) as here:
        tokenizer, architecture, training = _prepare(config)
        train, validation = _load(here, config, partial(load_supervised, config=config.data, tokenizer=tokenizer))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        algorithm = SFT(config.algorithm, policy, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed)
        keeper = RunCheckpointer(here, policy.model, name=POLICY, tokenizer=tokenizer_directory(config.model), config=config.checkpoint)
        last = run_loop(here, algorithm, keeper, config.loop, logging=config.logging, shown=columns.SFT, guard=config.guard)
        export_at_end(here, config, last, policy.chunks, tokenizer_directory(config.model))
        code = conclude(here, last, config.loop.max_steps)
    return code


def train_reward_model(config: TrainRewardModel) -> int:
    """Bradley-Terry training of a reward model. Every rank calls it."""
    with session(config, config.run, config.parallel, component="reward_model") as here:
        tokenizer, architecture, training = _prepare(config)
        train, validation = _load(here, config, partial(load_preferences, config=config.data, tokenizer=tokenizer))
        model = create.create_reward_model(config.model, architecture, config.parallel, here.topology, training)
        algorithm = RewardModelTraining(
            config.algorithm, model, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        keeper = RunCheckpointer(
            here, model.model, name=REWARD_MODEL, tokenizer=tokenizer_directory(config.model), config=config.checkpoint
        )
        last = run_loop(here, algorithm, keeper, config.loop, logging=config.logging, shown=columns.REWARD_MODEL, guard=config.guard)
        code = conclude(here, last, config.loop.max_steps)
    return code


def train_dpo(config: TrainDPO) -> int:
    """Preference losses on pairs; the reference, where the loss has one, is the model that the run starts from. Every rank calls it."""
    with session(config, config.run, config.parallel, component="dpo") as here:
        config = replace(config, model=pinned(here, "model", config.model))
        tokenizer, architecture, training = _prepare(config)
        train, validation = _load(here, config, partial(load_preferences, config=config.data, tokenizer=tokenizer))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        reference = ReferencePolicy(policy) if config.algorithm.loss.needs_reference else None  # before a resumed run loads its checkpoint
        algorithm = DPO(
            config.algorithm, policy, reference, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        keeper = RunCheckpointer(here, policy.model, name=POLICY, tokenizer=tokenizer_directory(config.model), config=config.checkpoint)
        last = run_loop(here, algorithm, keeper, config.loop, logging=config.logging, shown=columns.DPO, guard=config.guard)
        export_at_end(here, config, last, policy.chunks, tokenizer_directory(config.model))
        code = conclude(here, last, config.loop.max_steps)
    return code


def train_kto(config: TrainKTO) -> int:
    """Kahneman-Tversky optimisation; the reference is the model that the run starts from. Every rank calls it."""
    with session(config, config.run, config.parallel, component="kto") as here:
        config = replace(config, model=pinned(here, "model", config.model))
        tokenizer, architecture, training = _prepare(config)
        train, validation = _load(here, config, partial(load_unpaired, config=config.data, tokenizer=tokenizer))
        here.say(balance(train, config.algorithm))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        algorithm = KTO(
            config.algorithm,
            policy,
            ReferencePolicy(policy),  # before a resumed run loads its checkpoint
            train=train,
            validation=validation,
            max_length=config.data.max_length,
            pad_id=tokenizer.pad_id,
            seed=config.run.seed,
        )
        keeper = RunCheckpointer(here, policy.model, name=POLICY, tokenizer=tokenizer_directory(config.model), config=config.checkpoint)
        last = run_loop(here, algorithm, keeper, config.loop, logging=config.logging, shown=columns.KTO, guard=config.guard)
        export_at_end(here, config, last, policy.chunks, tokenizer_directory(config.model))
        code = conclude(here, last, config.loop.max_steps)
    return code


def _prepare(config: TrainSFT | TrainRewardModel | TrainDPO | TrainKTO) -> tuple[Tokenizer, Architecture, Training]:
    tokenizer, architecture = load_model_files(config.model)
    check_length(config.model, architecture, config.data.max_length)
    return (
        tokenizer,
        architecture,
        create.training(config.model, config.optimizer, total_steps=config.loop.max_steps, guard=Guard(config.guard)),
    )


def _load(
    here: Session, config: TrainSFT | TrainRewardModel | TrainDPO | TrainKTO, load: Callable[[str], tuple[list[Example], LoadReport]]
) -> tuple[list[Example], list[Example]]:
    """(training examples, validation examples: none where no file is named). Bad lines are found before any model is built."""
    train, report = load(config.data.train)
    here.say(report.summary())
    return train, load(config.data.validation)[0] if config.data.validation else []
