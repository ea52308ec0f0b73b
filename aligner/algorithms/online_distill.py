"""On-policy distillation (GKD, Agarwal et al. 2023, 2306.13649): the student learns what the teacher would have said in the student's text.

One step: sample responses to prompts; the teacher's log-probs in each of their places; updates of the student, with `signal`

    topk      on divergence(teacher, student), both renormalised over the teacher's K likeliest tokens (backward KL unless set otherwise)
    sampled   on PPO's clipped surrogate with the advantage log teacher - log student of each sampled token, whose gradient is that of
              -KL(student || teacher) over the whole vocabulary, estimated from one token per place.

`topk` has less variance, but does not see what the student does outside the teacher's K tokens; `sampled` does. Gradients do not go through
the sampling itself, as in the paper. Against `distill.py`: the text is the student's, so it learns where it errs; the teacher is asked
at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from aligner.algorithms.distill import DivergenceConfig, distillation_terms
from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError, check_numbers
from aligner.hub.names import Files
from aligner.loop.learnt import of_mask
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.aggregation import Aggregation
from aligner.losses.correction import with_gap
from aligner.losses.distillation import Divergence
from aligner.losses.policy import policy_loss
from aligner.models.config import ModelConfig
from aligner.online.collect import collect, response_metrics, sample_rows, sample_seeds
from aligner.online.config import OnlineRun
from aligner.online.rollout_source import OnlineAlgorithm, RolloutSource
from aligner.online.task import SAMPLED, OnlineTask
from aligner.protocols import Policy, Teacher
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import JobRun, Traits, check_best_metric
from aligner.types import DistillationBatch, PolicyBatch, RolloutBatch
from aligner.types.batches import of_kind

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob

REPORTS = ("validation/reverse_kl", "validation/response_length")  # of a validation


class Signal(str, Enum):
    """The teacher's signal for training; see the module's docstring."""

    topk = "topk"
    sampled = "sampled"


@dataclass(kw_only=True, slots=True)
class OnlineDistillationConfig(DivergenceConfig):
    """Settings of on-policy distillation. Those of the divergence are for signal=topk."""

    divergence: Divergence = Divergence.backward_kl
    signal: Signal = Signal.topk  # topk: the teacher's likeliest tokens at every position; sampled: its log-probs of the sampled tokens
    top_k: int = 64  # of the teacher's likeliest tokens; signal=topk
    prompts_per_step: int = 64  # prompts of a training step, each with group_size responses
    group_size: int = 1  # responses sampled per prompt
    mini_batch_size: int = 64  # responses per update, at most
    num_epochs: int = 1  # passes over a step's responses
    clip_eps: float = 0.2  # of the ratio; signal=sampled

    def __post_init__(self) -> None:
        DivergenceConfig.__post_init__(self)
        sizes = ("top_k", "prompts_per_step", "group_size", "mini_batch_size", "num_epochs")
        check_numbers(self, "algorithm", at_least_1=sizes, above_0=("clip_eps",))
        if self.signal is Signal.sampled and self.ce_coef:
            raise ConfigError(f"algorithm.ce_coef={self.ce_coef}: the text is the student's own; allowed with signal=sampled: 0")

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled in one training step."""
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one training step."""
        return -(-self.rollouts_per_step // self.mini_batch_size) * self.num_epochs


class OnlineDistillation(OnlineAlgorithm[OnlineDistillationConfig]):
    """The algorithm over its parts, on every rank. `below`: above the tokenizer's ids. `judged`: rewards are reported."""

    def __init__(
        self,
        config: OnlineDistillationConfig,
        policy: Policy,
        task: OnlineTask,
        teacher: Teacher,
        *,
        below: int,
        judged: bool = False,
        rollout_source: RolloutSource | None = None,
    ) -> None:
        super().__init__(config, policy, task, rollout_source, group_size=config.group_size)
        self.teacher = teacher
        self.below = below
        self.judged = judged
        clip = config.clip_eps
        self.topk_loss = with_gap(partial(distillation_terms, **config.settings()))
        self.sampled_loss = partial(policy_loss, clip_eps_low=clip, clip_eps_high=clip, aggregation=Aggregation.token_mean)

    def step(self, step: int, clock: Clock) -> StepResult:
        collected, batch = self.sample(step, clock)
        metrics = response_metrics(collected, clock.seconds["time/generate"])
        if not self.judged:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/reward")}
        with clock.phase("teacher_logprobs"):
            examples, found = self.examples(batch)
        with clock.phase("train"):
            if isinstance(examples, DistillationBatch):
                metrics |= self.update(examples, self.topk_loss, step)
            else:
                metrics |= self.update(examples, self.sampled_loss, step)
        return self.result(collected, metrics | of_mask(batch.loss_mask) | found)

    def examples(self, batch: RolloutBatch) -> tuple[DistillationBatch | PolicyBatch, dict[str, float]]:
        """The training examples, and their metrics so far."""
        sampled = {"rollout_logprobs": batch.rollout_logprobs if self.task.compares_logprobs else None}
        if self.config.signal is Signal.topk:
            named, logprobs = self.teacher.topk(batch, self.config.top_k, below=self.below)
            mass = logprobs[batch.loss_mask].double().exp().sum(dim=1).mean().item()
            return of_kind(DistillationBatch, batch, **sampled, teacher_tokens=named, teacher_logprobs=logprobs), {"teacher/mass": mass}
        teacher, student = self.teacher.logprobs(batch), self.policy.logprobs(batch)
        apart = {"distillation/reverse_kl": (student - teacher)[batch.loss_mask].double().mean().item()}
        return of_kind(PolicyBatch, batch, **sampled, old_logprobs=student, advantages=teacher - student), apart

    def validate(self) -> Mapping[str, float]:
        """Log student - log teacher of a token, the mean over samples for the validation prompts: an estimate of KL(student || teacher)."""
        task = self.task
        if not task.validation.prompts:
            return {}
        prompts = list(task.validation.prompts)
        collected = collect(task.engine, prompts, sample_seeds(task.seed, 0, len(prompts)), scorers=task.scorers())
        batch = rollout_batch(collected.rollouts, task.pad_id)
        apart = (self.policy.logprobs(batch) - self.teacher.logprobs(batch))[batch.loss_mask]
        task.validation.keep_samples(sample_rows(collected, task.decode))
        return {
            "validation/reverse_kl": apart.double().mean().item(),
            "validation/response_length": batch.loss_mask.sum(dim=1).double().mean().item(),
        }


COLUMNS = (
    Column("loss", "distillation/loss", ".4f", Goal.lowest),
    Column("reverse KL", "distillation/reverse_kl", ".4f", Goal.lowest),
    Column("val reverse KL", "validation/reverse_kl", ".4f", Goal.lowest),
    Column("agreement", "distillation/agreement", "percent", Goal.highest),
    *SAMPLED,
)


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """A frozen model of the student's architecture, whose weights wait in host memory."""

    path: str = ""  # required: a Hugging Face directory, ORG/NAME[@REV] of the Hub, or a checkpoint of this project
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model}


@dataclass(kw_only=True, slots=True)
class TrainOnlineDistillation(OnlineRun):
    """Distillation on the student's own samples (conf/online_distill/online_distill.yaml)."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: OnlineDistillationConfig = field(default_factory=OnlineDistillationConfig)

    def __post_init__(self) -> None:
        JobRun.__post_init__(self)
        self.check_sessions()
        check_best_metric(self.checkpoint, self.loop, reports=REPORTS, validation=self.data.validation)

    def traits(self) -> Traits:
        return self.actor_traits(has_reference=True)

    def check_complete(self) -> None:
        self.check_given_rewards()


def build(job: OnlineJob[TrainOnlineDistillation]) -> Built:
    config, settings = job.config, job.config.algorithm
    teacher_model = _teacher_model(job)
    task = job.task(with_reference=False, num_prompts=settings.prompts_per_step)
    job.ready()
    algorithm = OnlineDistillation(
        settings,
        job.policy,
        task,
        job.frozen(job.policy, teacher_model),
        below=job.tokenizer.max_token_id + 1,
        judged=config.has_scorer or config.environment.is_on,
        rollout_source=job.rollout_source(task, group_size=settings.group_size),
    )
    return Built(algorithm=algorithm, model=job.policy.model)


def _teacher_model(job: OnlineJob[TrainOnlineDistillation]) -> ModelConfig:
    """The teacher's model, the same at every start. Raises ConfigError if its weights do not fit the student's module."""
    path = job.config.teacher.path
    if not path:
        raise ConfigError("teacher.path='': name the teacher, a Hugging Face directory or a checkpoint of this project")
    model, _ = job.frozen_model(
        "teacher",
        path,
        setting=f"teacher.path={path}",
        whose="the student's",
        otherwise="A teacher of another shape writes its log-probs beforehand (teacher_logprobs, then distill)",
    )
    return model


RECIPE = Recipe(name="online_distill", config=TrainOnlineDistillation, build=build, columns=COLUMNS)
