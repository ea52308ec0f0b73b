"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, 2402.01306): responses that are each judged good or bad, without a partner.

One step: a batch of judged responses; the frozen reference's log-probs; an estimate z of the policy's KL to the reference, from prompts
paired with the responses to *other* prompts of the batch; one update of the policy on

    w sigma(-beta (d - z)) if desirable, w sigma(-beta (z - d)) if not,    d = log pi - log pi_ref of the response.

Against DPO (`dpo.py`): a thumb up or down is enough, and the two kinds need not be equally many (`desirable_weight`,
`undesirable_weight`); what a response is compared with is z and not its partner. z is of the whole batch and has no gradient, so that
micro-batches and layouts do not change it; it costs one more pass without gradient of each model. With `reference=precomputed` the
reference's passes, of the responses and of every step's mismatched rows, were made before the first step (see `dpo.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from aligner.data.config import UnpairedDataConfig
from aligner.data.judged import MismatchedSteps, UnpairedExample, load_unpaired, mismatched, unpaired_batch
from aligner.data.order import order_of
from aligner.errors import ConfigError, DataError, check_numbers
from aligner.loop.epochs import ReferenceLogprobs, Stateless, check_reference
from aligner.loop.learnt import of_lengths, of_mask
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.aggregation import require
from aligner.losses.preference import UnpairedLoss, kl_baseline, kto_loss, mean_log_ratio
from aligner.planner.workload import Phase
from aligner.protocols import Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import TrainerRun, Traits, reading
from aligner.telemetry.metrics import Mean, merge, values
from aligner.types import LabeledBatch, TokenOutputs

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class KTOConfig:
    """Settings of KTO."""

    loss: UnpairedLoss = UnpairedLoss.kto  # what a log-ratio is compared with: kto: an estimate of the KL to the reference; apo_zero: 0
    beta: float = 0.1  # how strongly the reference holds
    desirable_weight: float = 1.0  # times the number of desirable responses: 1 to 4/3 of the same of undesirable ones is advised
    undesirable_weight: float = 1.0  # factor of undesirable responses' losses; see desirable_weight
    sft_coef: float = 0.0  # of a desirable response's negative log-likelihood per token
    average_logprobs: bool = False  # over a response's tokens, not their sum
    batch_size: int = 64  # responses per update; the KL is estimated over as many
    validation_batch_size: int = 64  # responses per forward batch of a validation
    reference: ReferenceLogprobs = ReferenceLogprobs.live  # live: computed for each batch; precomputed: for all before step 1, to files
    reference_part_size: int = 1024  # precomputed: responses per file of log-probs, what a run that is killed computes again, at most

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", above_0=("beta",), not_negative=("desirable_weight", "undesirable_weight", "sft_coef"))
        check_numbers(self, "algorithm", at_least_1=("validation_batch_size",))
        if self.batch_size < 2:
            raise ConfigError(f"algorithm.batch_size={self.batch_size}: must be at least 2: each prompt is paired with another's response")
        check_reference(self.reference, self.reference_part_size, is_needed=True, loss=self.loss.value)

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the weights is there while the policy is trained."""
        return self.reference is ReferenceLogprobs.live

    @property
    def reports(self) -> list[str]:
        """The names of the metrics that a validation gives."""
        names = ["loss", "accuracy", "kl", "desirable_reward", "undesirable_reward"]
        return [f"validation/{name}" for name in names + ["sft_loss"] * (self.sft_coef > 0)]


class Reference(Protocol):
    """The frozen policy that the log-ratios are taken against."""

    def logprobs_of(self, batches: Sequence[LabeledBatch]) -> list[Tensor]:
        """`Policy.logprobs` of each batch. Several at once: bringing its weights takes time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMismatches:
    """Mismatched rows with the reference's log-probs: of all training steps one behind the other, and of the validation examples."""

    train: Sequence[UnpairedExample] = ()
    validation: Sequence[UnpairedExample] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Responses with the reference's log-probs, and the mismatched rows that the KL is estimated on (None if none is)."""

    matched: LabeledBatch
    mismatched: LabeledBatch | None


@dataclass(eq=False)
class KTO(Stateless):
    """`max_length` cuts mismatched rows, which may be longer than any example. `reference` is None if its log-probs are `stored`, and the
    examples bring theirs. Raises DataError for a single validation example.
    """

    config: KTOConfig
    policy: Policy
    reference: Reference | None
    _: KW_ONLY
    train: Sequence[UnpairedExample]
    validation: Sequence[UnpairedExample]
    max_length: int
    pad_id: int
    seed: int
    stored: StoredMismatches | None = None

    def __post_init__(self) -> None:
        config, reference, stored = self.config, self.reference, self.stored
        if config.loss.needs_kl and len(self.validation) == 1:
            raise DataError("data.validation has one usable response; the KL is estimated on prompts paired with the responses to others")
        if config.keeps_reference != (reference is not None) or config.keeps_reference != (stored is None):
            raise ValueError(f"reference is {reference} and stored is {stored}, expected one: algorithm.reference={config.reference.value}")
        self.order = order_of(self.train, config.batch_size, self.seed)
        self.loss = partial(
            kto_loss,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
            sft_coef=config.sft_coef,
            average_logprobs=config.average_logprobs,
        )
        self._validation: list[Judged] = []  # from the first validation on

    def step(self, step: int, clock: Clock) -> StepResult:
        examples = [self.train[i] for i in self.order.indices(step - 1)]
        with clock.phase("ref_logprobs"):
            (judged,) = self._judged(examples, self._mismatched(examples, step), len(examples))
        with clock.phase("logprobs"):
            kl = self._kl([judged])
        with clock.phase("train"):
            metrics = values(self.policy.train_step(judged.matched, partial(self.loss, kl=kl)))
        seconds = sum(clock.seconds[f"time/{phase}"] for phase in ("ref_logprobs", "logprobs", "train"))
        found = of_lengths(judged.matched.lengths, seconds) | of_mask(judged.matched.loss_mask)
        return StepResult(metrics=metrics | found | self.order.metrics(step))

    def validate(self) -> Mapping[str, float]:
        """Loss and metrics on the validation responses, as `validation/*`; z covers all of them."""
        if not self._validation:
            examples = list(self.validation)
            self._validation = self._judged(examples, self._mismatched(examples, 0), self.config.validation_batch_size)
        if not self._validation:
            return {}
        loss = partial(self.loss, kl=self._kl(self._validation))
        parts = [loss(TokenOutputs(logprobs=self.policy.logprobs(one.matched)), one.matched).metrics for one in self._validation]
        return {name.replace("kto/", "validation/"): value for name, value in values(merge(parts)).items()}

    def _mismatched(self, examples: Sequence[UnpairedExample], step: int) -> Sequence[UnpairedExample]:
        """The rows that the KL of a step is estimated on (0: of the validation); none if none is. May be of any of the examples."""
        if not (self.config.loss.needs_kl and examples):
            return []
        if self.stored is None:
            return mismatched(examples, self.max_length)
        if not step:
            return list(self.stored.validation)
        return [self.stored.train[(step - 1) * len(examples) + row] for row in range(len(examples))]

    def _judged(self, examples: Sequence[UnpairedExample], others: Sequence[UnpairedExample], size: int) -> list[Judged]:
        """In the batches, of `size`, that the policy will see, so that where the two are equal their log-probs are, to the last bit."""
        found = []
        for start in range(0, len(examples), size):
            batches = [unpaired_batch(rows[start : start + size], self.pad_id) for rows in (examples, others) if rows]
            if self.reference is not None:
                logprobs = self.reference.logprobs_of(batches)
                batches = [replace(batch, ref_logprobs=own) for batch, own in zip(batches, logprobs, strict=True)]
            found.append(Judged(matched=batches[0], mismatched=batches[1] if others else None))
        return found

    def _kl(self, judged: Sequence[Judged]) -> float:
        """z over all mismatched rows, under the current policy."""
        return kl_baseline([self._ratio(one.mismatched) for one in judged if one.mismatched]) if self.config.loss.needs_kl else 0.0

    def _ratio(self, batch: LabeledBatch) -> Mean:
        return mean_log_ratio(
            self.policy.logprobs(batch),
            require(batch.ref_logprobs, "LabeledBatch.ref_logprobs"),
            batch.loss_mask,
            average_logprobs=self.config.average_logprobs,
        )


def balance(examples: Sequence[UnpairedExample], config: KTOConfig) -> str:
    """How many responses of each kind there are; advice if their weights are far from equal (2402.01306, equation 8)."""
    good = sum(example.desirable for example in examples)
    bad, counts = len(examples) - good, f"{good} desirable and {len(examples) - good} undesirable responses"
    if not (good and bad and config.undesirable_weight):
        return counts
    ratio = config.desirable_weight * good / (config.undesirable_weight * bad)
    if 0.99 < ratio < 1.34:
        return counts
    least = config.undesirable_weight * bad / good
    return (
        f"{counts}, of weight {ratio:.3g} to 1 in all; advised is 1 to 4/3: algorithm.desirable_weight={least:.3g} to {4 / 3 * least:.3g}"
    )


COLUMNS = (
    Column("loss", "kto/loss", ".4f", Goal.lowest),
    Column("accuracy", "kto/accuracy", "percent", Goal.highest),
    Column("KL", "kto/kl", ".3f"),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("desirable", "kto/desirable_reward", ".3f"),
    Column("undesirable", "kto/undesirable_reward", ".3f"),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainKTO(TrainerRun):
    """Kahneman-Tversky optimisation on responses that are judged one by one (conf/kto/kto.yaml)."""

    data: UnpairedDataConfig = field(default_factory=UnpairedDataConfig)
    algorithm: KTOConfig = field(default_factory=KTOConfig)
    read = reading(load_unpaired)
    has_frozen_start = True

    def traits(self) -> Traits:
        return self.batch_traits(
            phases=(Phase.logprobs,) if self.algorithm.loss.needs_kl else (),  # of rows that are not trained on, and shorter
            has_reference=self.algorithm.keeps_reference,
        )


def build(job: TrainerJob[TrainKTO]) -> Built | None:
    """The reference is the model that the run starts from."""
    settings = job.config.algorithm
    train, validation = job.load(load_unpaired)
    job.session.say(balance(train, settings))
    policy = job.policy()
    reference = job.reference(policy) if settings.keeps_reference else None
    mismatches = None
    if settings.reference is ReferenceLogprobs.precomputed:
        sets = {"train": train, "validation": validation} | _mismatched_sets(job.config, train, validation)
        stored = job.with_reference(policy, sets)
        if stored is None:
            return None
        train, validation, *others = stored
        mismatches = StoredMismatches(train=others[0], validation=others[1]) if others else StoredMismatches()
    algorithm = KTO(
        settings,
        policy,
        reference,
        train=train,
        validation=validation,
        max_length=job.config.data.max_length,
        stored=mismatches,
        **job.common,
    )
    return Built(algorithm=algorithm, model=policy.model)


def _mismatched_sets(config: TrainKTO, train: Sequence[UnpairedExample], validation: Sequence[UnpairedExample]) -> dict[str, Any]:
    """The mismatched rows of all steps and of the validation, if the loss needs them. Their tokens are those of the responses."""
    if not config.algorithm.loss.needs_kl:
        return {}
    size, seed, length, steps = config.algorithm.batch_size, config.run.seed, config.data.max_length, config.loop.max_steps
    of_steps = MismatchedSteps(train, order_of(train, size, seed), length, steps)
    made_by = f"{steps} steps of {size}, seed {seed}, {length} tokens"
    return {"mismatched": (of_steps, made_by), "mismatched_validation": mismatched(validation, length) if len(validation) > 1 else []}


RECIPE = Recipe(name="kto", config=TrainKTO, build=build, columns=COLUMNS)
