"""The trainers of one component: supervised fine-tuning, reward models, and preference losses on pairs and on single responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from aligner.algorithms.dpo import DPO
from aligner.algorithms.kto import KTO, StoredMismatches, balance
from aligner.algorithms.loop import Algorithm
from aligner.algorithms.process_reward_model import ProcessRewardModelTraining
from aligner.algorithms.reference import ReferenceLogprobs
from aligner.algorithms.regression_reward_model import RegressionTraining
from aligner.algorithms.reward_model import RewardModelTraining
from aligner.algorithms.sft import SFT
from aligner.cluster.exit_codes import ExitCode
from aligner.cluster.run_directory import POLICY, REWARD_MODEL
from aligner.data.preferences import load_preferences
from aligner.data.regression import load_regression
from aligner.data.steps import load_steps
from aligner.data.supervised import load_supervised
from aligner.data.tokenizer import Tokenizer
from aligner.data.unpaired import load_unpaired
from aligner.jobs import columns
from aligner.jobs.batches import batches_of
from aligner.jobs.checks import check_trainer
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files, load_sets, tokenizer_directory
from aligner.jobs.session import Session, session
from aligner.jobs.sources import pinned, pinned_base
from aligner.jobs.stored_reference import pair_sets, response_sets, with_reference
from aligner.jobs.training import train_to_end
from aligner.models import create
from aligner.models.config import Architecture
from aligner.models.guard import Guard
from aligner.models.policy import ReferencePolicy
from aligner.models.scalar_head import Pooling, ScalarHead
from aligner.models.trainable import TrainableModel, Training
from aligner.reporting.formats import Column
from aligner.schemas import (
    TrainDPO,
    TrainerRun,
    TrainKTO,
    TrainProcessRewardModel,
    TrainRegressionRewardModel,
    TrainRewardModel,
    TrainSFT,
)

Run = TypeVar("Run", TrainSFT, TrainRewardModel, TrainRegressionRewardModel, TrainProcessRewardModel, TrainDPO, TrainKTO)


def train_sft(config: TrainSFT, *, component: str = "sft") -> int:
    """Supervised fine-tuning. Every rank calls it."""
    with session(config, config.run, config.parallel, component=component) as here:
        config = replace(config, model=pinned_base(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_supervised, config.data, tokenizer)
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        here.say(batches_of(train, config, policy.model))
        algorithm = SFT(config.algorithm, policy, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed)
        code = _train(here, config, algorithm, policy.model, columns.SFT)
    return code


def train_reward_model(config: TrainRewardModel) -> int:
    """Bradley-Terry training of a reward model. Every rank calls it."""
    with session(config, config.run, config.parallel, component="reward_model") as here:
        config = replace(config, model=pinned_base(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_preferences, config.data, tokenizer)
        head = ScalarHead(pooling=config.algorithm.pooling)
        model = create.create_reward_model(config.model, architecture, config.parallel, here.topology, training, head=head)
        here.say(batches_of([row for pair in train for row in (pair.chosen, pair.rejected)], config, model.model, unit=2))
        algorithm = RewardModelTraining(
            config.algorithm, model, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        code = _train(here, config, algorithm, model.model, columns.REWARD_MODEL, name=REWARD_MODEL)
    return code


def train_regression_reward_model(config: TrainRegressionRewardModel) -> int:
    """Regression of a reward model on attributes. Every rank calls it."""
    with session(config, config.run, config.parallel, component="regression_reward_model") as here:
        config = replace(config, model=pinned_base(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_regression, config.data, tokenizer)
        head = ScalarHead(outputs=tuple(config.data.attributes), pooling=config.algorithm.pooling)
        model = create.create_reward_model(config.model, architecture, config.parallel, here.topology, training, head=head)
        here.say(batches_of([example.row for example in train], config, model.model))
        algorithm = RegressionTraining(
            config.algorithm,
            model,
            attributes=config.data.attributes,
            train=train,
            validation=validation,
            pad_id=tokenizer.pad_id,
            seed=config.run.seed,
        )
        code = _train(here, config, algorithm, model.model, columns.REGRESSION, name=REWARD_MODEL)
    return code


def train_process_reward_model(config: TrainProcessRewardModel) -> int:
    """Training of a reward model on steps. Every rank calls it."""
    with session(config, config.run, config.parallel, component="process_reward_model") as here:
        config = replace(config, model=pinned_base(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_steps, config.data, tokenizer)
        head = ScalarHead(outputs=("step",), pooling=Pooling.tokens)
        model = create.create_reward_model(config.model, architecture, config.parallel, here.topology, training, head=head)
        here.say(batches_of([example.row for example in train], config, model.model))
        algorithm = ProcessRewardModelTraining(
            config.algorithm, model, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        code = _train(here, config, algorithm, model.model, columns.REWARD_MODEL, name=REWARD_MODEL)
    return code


def train_dpo(config: TrainDPO) -> int:
    """Preference losses on pairs; the reference, where the loss has one, is the model that the run starts from. Every rank calls it."""
    with session(config, config.run, config.parallel, component="dpo") as here:
        config = replace(config, model=pinned(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_preferences, config.data, tokenizer)
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        here.say(batches_of([row for pair in train for row in pair.rows], config, policy.model, unit=2))
        # The reference is what the policy is before a resumed run loads its checkpoint.
        reference = ReferencePolicy(policy) if config.algorithm.keeps_reference else None
        if config.algorithm.reference is ReferenceLogprobs.precomputed:
            stored = with_reference(here, config, policy, tokenizer, pair_sets(train, validation))
            if stored is None:
                return ExitCode.stopped
            train, validation = stored
        algorithm = DPO(
            config.algorithm, policy, reference, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        code = _train(here, config, algorithm, policy.model, columns.DPO)
    return code


def train_kto(config: TrainKTO) -> int:
    """Kahneman-Tversky optimisation; the reference is the model that the run starts from. Every rank calls it."""
    with session(config, config.run, config.parallel, component="kto") as here:
        config = replace(config, model=pinned(here, "model", config.model))
        config, tokenizer, architecture, training = _prepare(here, config)
        train, validation = load_sets(here, load_unpaired, config.data, tokenizer)
        here.say(balance(train, config.algorithm))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        # The reference is what the policy is before a resumed run loads its checkpoint.
        reference = ReferencePolicy(policy) if config.algorithm.keeps_reference else None
        mismatches = None
        if config.algorithm.reference is ReferenceLogprobs.precomputed:
            stored = with_reference(here, config, policy, tokenizer, response_sets(config, train, validation))
            if stored is None:
                return ExitCode.stopped
            train, validation, *others = stored
            mismatches = StoredMismatches(train=others[0], validation=others[1]) if others else StoredMismatches()
        algorithm = KTO(
            config.algorithm,
            policy,
            reference,
            train=train,
            validation=validation,
            max_length=config.data.max_length,
            pad_id=tokenizer.pad_id,
            seed=config.run.seed,
            stored=mismatches,
        )
        code = _train(here, config, algorithm, policy.model, columns.KTO)
    return code


def _train(
    here: Session, config: TrainerRun, algorithm: Algorithm, model: TrainableModel, shown: Sequence[Column], *, name: str = POLICY
) -> int:
    return train_to_end(here, config, algorithm, model, tokenizer=tokenizer_directory(config.model), shown=shown, name=name)


def _prepare(here: Session, config: Run) -> tuple[Run, Tokenizer, Architecture, Training]:
    """The config with the lengths that its model has, and what is made of it."""
    tokenizer, architecture = load_model_files(config.model)
    check_trainer(config, architecture, here.topology.world_size)
    return (
        with_lengths(config),
        tokenizer,
        architecture,
        create.training(config.model, config.optimizer, total_steps=config.loop.max_steps, guard=Guard(config.guard)),
    )
