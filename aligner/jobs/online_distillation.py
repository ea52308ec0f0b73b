"""On-policy distillation: the student samples, a teacher in the same processes says what it would have done."""

from __future__ import annotations

from dataclasses import replace

from aligner.algorithms.online_distillation import OnlineDistillation
from aligner.errors import ConfigError
from aligner.jobs import columns
from aligner.jobs.announce import announced
from aligner.jobs.lengths import with_lengths
from aligner.jobs.online import build_task
from aligner.jobs.parts import load_model_files
from aligner.jobs.same_shape import check_same_shape
from aligner.jobs.sampling_ahead import rounds_ahead
from aligner.jobs.session import Session, session
from aligner.jobs.sources import pinned
from aligner.jobs.training import train_to_end
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.models.policy import ReferencePolicy
from aligner.schemas import TrainOnlineDistillation


def train_online_distillation(config: TrainOnlineDistillation) -> int:
    """Distillation on the student's own samples. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        teacher_model = teacher_of(here, config)
        settings = config.algorithm
        task, policy, tokenizer = build_task(here, config, with_reference=False, num_prompts=settings.prompts_per_step)
        if publication is not None:
            publication.ready()
        teacher = ReferencePolicy(policy, whole=True)
        teacher.restore(lambda chunks: create.load_source(chunks, teacher_model))
        algorithm = OnlineDistillation(
            settings,
            policy,
            task,
            teacher,
            below=load_model_files(config.model)[0].max_token_id + 1,
            judged=config.has_scorer or bool(config.environment.function),
            rounds=rounds_ahead(here, config, task, group_size=settings.group_size),
        )
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.ONLINE_DISTILLATION)
        task.engine.shutdown()
        task.reward.close()
    return code


def teacher_of(here: Session, config: TrainOnlineDistillation) -> ModelConfig:
    """The teacher's model; the same one at every start of the run.

    Raises ConfigError where it cannot take the student's place: its weights are put into the student's module for a pass.
    """
    if not config.teacher.path:
        raise ConfigError("teacher.path='': name the teacher, a Hugging Face directory or a checkpoint of this project")
    model = pinned(here, "teacher", replace(config.model, path=config.teacher.path, tokenizer=""))
    check_same_shape(
        config.model,
        model,
        setting=f"teacher.path={config.teacher.path}",
        whose="the student's",
        otherwise="A teacher of another shape writes its log-probs beforehand (teacher_logprobs, then distill)",
    )
    return model
