"""SteerLM 2: the trainer on several weighed responses to each prompt."""

from __future__ import annotations

from dataclasses import replace

from aligner.algorithms.steerlm2 import Proposal, SteerLM2
from aligner.data.proposals import load_proposals
from aligner.jobs import columns
from aligner.jobs.checks import check_trainer
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files, load_sets, tokenizer_directory
from aligner.jobs.session import session
from aligner.jobs.sources import pinned
from aligner.jobs.training import train_to_end
from aligner.models import create
from aligner.models.guard import Guard
from aligner.models.policy import ReferencePolicy
from aligner.schemas import TrainSteerLM2


def train_steerlm2(config: TrainSteerLM2) -> int:
    """SteerLM 2. Every rank calls it."""
    with session(config, config.run, config.parallel, component="steerlm2") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_trainer(config, architecture, here.topology.world_size)
        train, validation = load_sets(here, load_proposals, config.data, tokenizer)
        training = create.training(config.model, config.optimizer, total_steps=config.loop.max_steps, guard=Guard(config.guard))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        reference = ReferencePolicy(policy) if config.algorithm.proposal is Proposal.start else None
        algorithm = SteerLM2(
            config.algorithm, policy, reference, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        tokenizer = tokenizer_directory(config.model)
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.STEERLM2)
    return code
