"""Self-play fine-tuning (SPIN, Chen et al. 2024, 2401.01335): the policy learns to prefer the data to its own earlier responses.

Iteration i: the current policy becomes the reference and answers the prompts; then `epochs_per_iteration` passes over pairs (chosen: the
given response, rejected: its own) with a loss of `aligner.losses.preference`,

    -log sigma(beta ((l_chosen - ref_chosen) - (l_rejected - ref_rejected))).

Against DPO (`dpo.py`): nobody compares responses, supervised data are enough. Against `online_dpo.py`: no reward, and the samples are one
iteration old. Against SFT (`sft.py`): it improves after SFT has converged, until the policy's responses cannot be told from the data's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from aligner.algorithms.iterations import Answer, Iteration, IterationConfig, PairIterations, SampleFiles
from aligner.algorithms.online_dpo import MovingReference
from aligner.data.collate import PreferencePair, supervised_batch
from aligner.data.config import DemonstrationDataConfig
from aligner.data.order import EpochSampler
from aligner.data.reading import Mixed
from aligner.data.supervised import Demonstration, answered, load_demonstrations
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, check_numbers
from aligner.loop.epochs import mean_loss
from aligner.loop.learnt import accounted
from aligner.loop.loop import Built, Clock
from aligner.online.config import OnlineRun, check_iterated
from aligner.online.task import OnlineTask
from aligner.protocols import Policy
from aligner.reporting.formats import Column, Goal
from aligner.run import lengths
from aligner.run.recipe import Recipe
from aligner.run.settings import JobRun, Traits, check_best_metric, reading
from aligner.types import Prompt, SampleRow

if TYPE_CHECKING:
    from typing_extensions import Self

    from aligner.jobs.samples import OnlineJob

REPORTS = ("validation/loss",)  # of a validation


@dataclass(kw_only=True, slots=True)
class SPINConfig(IterationConfig):
    """Settings of SPIN."""

    epochs_per_iteration: int = 2
    validation_batch_size: int = 64  # examples per forward batch of a validation

    def __post_init__(self) -> None:
        IterationConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("validation_batch_size",))
        if not self.variant.needs_reference or self.variant.needs_margins:
            raise ConfigError(f"algorithm.loss={self.variant.value}: needs one with a reference and without rewards, such as sigmoid")


class SPIN(PairIterations[SPINConfig]):
    """The algorithm over its parts, on every rank. `settings`: text that says how is sampled; files of others are ignored."""

    area = "spin"

    def __init__(
        self,
        config: SPINConfig,
        policy: Policy,
        task: OnlineTask,
        reference: MovingReference,
        answers: SampleFiles[Answer],
        *,
        train: Sequence[Demonstration],
        validation: Sequence[Demonstration],
        settings: str = "",
    ) -> None:
        super().__init__(config, policy, task, reference, answers, prompts=_prompts_of(train), settings=settings)
        self.train = train
        self.validation = validation
        self._order = EpochSampler(self.num_prompts, config.batch_size, task.seed)
        self._examples: list[tuple[Demonstration, Answer]] = []

    def prepare(self, iteration: Iteration, answers: Sequence[Answer], clock: Clock) -> tuple[dict[str, float], Sequence[SampleRow]]:
        self.recall(iteration, answers)
        seen, learnt = len(self._examples), len(pairs_of(self._examples))
        return accounted(samples=learnt, seen=seen, identical=seen - learnt), ()

    def recall(self, iteration: Iteration, answers: Sequence[Answer]) -> None:
        self._examples = [(self.train[row], answer) for row, answer in zip(iteration.rows, answers, strict=True)]

    def pairs(self, iteration: int, position: int) -> tuple[list[PreferencePair], dict[str, float]]:
        rows = self._order.indices((iteration - 1) * self.steps_per_iteration + position)
        pairs = pairs_of([self._examples[row] for row in rows])
        return pairs, {"spin/identical": 1 - len(pairs) / len(rows)}

    def validate(self) -> Mapping[str, float]:
        """Mean token cross-entropy of the validation responses."""
        rows, size = [answered(one.prompt, one.response) for one in self.validation], self.config.validation_batch_size
        return mean_loss(self.policy, (supervised_batch(rows[at : at + size], self.task.pad_id) for at in range(0, len(rows), size)))


def pairs_of(examples: Sequence[tuple[Demonstration, Answer]]) -> list[PreferencePair]:
    """The given response chosen, the policy's own rejected; those that are the same teach nothing and are left out."""
    return [
        PreferencePair(chosen=answered(given.prompt, given.response), rejected=answered(given.prompt, answer.tokens), margin=0.0)
        for given, answer in examples
        if given.response != answer.tokens
    ]


COLUMNS = (
    Column("iteration", "spin/iteration", ".0f"),
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("same", "spin/identical", "percent"),
    Column("grad", "optim/grad_norm", ".2f"),
)


@dataclass(kw_only=True, slots=True)
class TrainSPIN(OnlineRun):
    """Self-play fine-tuning (conf/spin/spin.yaml)."""

    data: DemonstrationDataConfig = field(  # type: ignore[assignment]  # no PromptDataConfig: its prompts have answers
        default_factory=DemonstrationDataConfig
    )
    algorithm: SPINConfig = field(default_factory=SPINConfig)
    read = reading(load_demonstrations)
    batch_setting = "batch_size"

    def __post_init__(self) -> None:
        JobRun.__post_init__(self)
        check_best_metric(self.checkpoint, self.loop, reports=REPORTS, validation=self.data.validation)
        check_iterated(self)

    def traits(self) -> Traits:
        return self.actor_traits(unit=2, has_reference=True)

    def with_lengths(self, context: lengths.Context) -> Self:
        return lengths.sampled(lengths.examples(self, context), context)

    def check_complete(self) -> None:
        self.check_given_rewards()


def build(job: OnlineJob[TrainSPIN]) -> Built:
    """The reference is the policy at the beginning of each iteration."""
    config, settings = job.config, job.config.algorithm
    sets: dict[str, Sequence[Demonstration]] = {}
    task = job.task(with_reference=True, num_prompts=settings.batch_size, load=partial(_prompts, job, sets))
    job.ready()
    algorithm = SPIN(
        settings,
        job.policy,
        task,
        job.moving_reference(task),
        SampleFiles(job.session.directory.path / "spin", Answer),
        train=sets["train"],
        validation=sets["validation"],
        settings=repr(config.rollout.sampling),
    )
    job.session.say(algorithm.summary())
    return Built(algorithm=algorithm, model=job.policy.model)


def _prompts(
    job: OnlineJob[TrainSPIN], sets: dict[str, Sequence[Demonstration]], tokenizer: Tokenizer
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Fills `sets`; gives the task its prompts. No response is sampled in a validation."""
    sets["train"], sets["validation"] = job.load(load_demonstrations, tokenizer)
    return _prompts_of(sets["train"]), []


def _prompts_of(train: Sequence[Demonstration]) -> Sequence[Prompt]:
    return train.map(lambda one: one.prompt) if isinstance(train, Mixed) else [one.prompt for one in train]


RECIPE = Recipe(name="spin", config=TrainSPIN, build=build, columns=COLUMNS, presets_of=("dpo",))
