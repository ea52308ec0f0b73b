"""How every job that trains ends, once its algorithm is built: the loop with checkpoints, the export, the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.algorithms.loop import Algorithm
from aligner.cluster.run_directory import POLICY
from aligner.jobs.checkpointing import RunCheckpointer
from aligner.jobs.ending import conclude
from aligner.jobs.parts import export_at_end, run_loop
from aligner.jobs.session import Session
from aligner.models.trainable import TrainableModel
from aligner.protocols import Critic
from aligner.reporting.formats import Column
from aligner.schemas import TrainerRun


def train_to_end(
    here: Session,
    config: TrainerRun,
    algorithm: Algorithm,
    model: TrainableModel,
    *,
    tokenizer: Path,
    shown: Sequence[Column],
    name: str = POLICY,
    critic: Critic | None = None,
) -> int:
    """Train `model` to the last step, with checkpoints under `name`, and export it with the tokenizer of that directory.

    `critic` saves and resumes with it. Returns the exit code: 0, or 75 where a signal or the end of its time stopped the run before the
    last step. Every rank calls it.
    """
    damaged = config.run.damaged_checkpoint
    keeper = RunCheckpointer(here, model, name=name, tokenizer=tokenizer, config=config.checkpoint, critic=critic, damaged=damaged)
    last = run_loop(here, algorithm, keeper, config.loop, logging=config.logging, shown=shown, guard=config.guard, model=model)
    export_at_end(here, config, last, model.chunks, tokenizer)
    return conclude(here, last, config.loop.max_steps)
