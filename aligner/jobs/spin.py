"""Self-play fine-tuning: the actor that learns to prefer the data to its own responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aligner.algorithms.iterations import Answer
from aligner.algorithms.spin import SPIN
from aligner.data.demonstrations import Demonstration, load_demonstrations
from aligner.data.tokenizer import Tokenizer
from aligner.jobs import columns
from aligner.jobs.announce import announced
from aligner.jobs.kept_files import KeptFiles
from aligner.jobs.lengths import with_lengths
from aligner.jobs.moving_reference import CheckpointedReference
from aligner.jobs.online import build_task
from aligner.jobs.parts import load_sets
from aligner.jobs.session import Session, session
from aligner.jobs.training import train_to_end
from aligner.schemas import TrainSPIN
from aligner.types import Prompt


def train_spin(config: TrainSPIN) -> int:
    """SPIN; the reference is the policy at the beginning of each iteration. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        sets: dict[str, Sequence[Demonstration]] = {}
        load = partial(_load, here, config, sets)
        settings = config.algorithm
        task, policy, tokenizer = build_task(here, config, with_reference=True, num_prompts=settings.batch_size, load=load)
        if publication is not None:
            publication.ready()
        algorithm = SPIN(
            settings,
            policy,
            task,
            CheckpointedReference(here, policy, task.reference, verify=config.checkpoint.verify),
            KeptFiles(here.directory.path / "spin", Answer),
            train=sets["train"],
            validation=sets["validation"],
            settings=repr(config.rollout.sampling),
        )
        here.say(algorithm.summary())
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.SPIN)
        task.engine.shutdown()
        task.reward.close()
    return code


def _load(
    here: Session, config: TrainSPIN, sets: dict[str, Sequence[Demonstration]], tokenizer: Tokenizer
) -> tuple[list[Prompt], list[Prompt]]:
    """Fills `sets`; gives `build_task` the prompts. No response is sampled in a validation."""
    sets["train"], sets["validation"] = load_sets(here, load_demonstrations, config.data, tokenizer)
    return [one.prompt for one in sets["train"]], []
