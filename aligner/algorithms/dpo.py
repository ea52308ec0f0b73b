"""Direct preference optimisation (Rafailov et al. 2023, 2305.18290) and its kin: every loss of `aligner.losses.preference`.

One step: a batch of pairs of responses; the frozen reference's log-probs of both; one update of the policy on

    -log sigma(beta ((l_chosen - ref_chosen) - (l_rejected - ref_rejected)))

Against a reward model with PPO (`reward_model.py`, `ppo.py`): the same pairs, but the reward is implicit, beta log(pi / ref), so that
nothing is sampled and no critic is trained. Against `sft.py`: the rejected response pushes back, the reference holds in place. Losses
without a reference (SimPO, CPO, ORPO) make one pass less per step, and keep no second copy of the weights.

The reference's log-probs of a pair never change, except for last bits that depend on the batch's shape. `reference=live` computes them for
every batch in the shape that the policy will see, so that at the first step the two are equal to the last bit and D is exactly 0; it costs
a second copy of the weights in host memory, their way to the device, and a pass without backward half per step. `reference=precomputed`
reads them from files that were written before the first step (`aligner.jobs.stored_reference`): one pass in all, and no copy. They differ
from live ones by rounding, since sums are taken in other shapes: in float32 by less than 1e-6 of what they are, in bfloat16 by as much as
any two shapes do. Validation batches are always the same ones, so theirs are kept either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aligner.data.collate import PreferencePair, preference_batch
from aligner.data.config import PreferenceDataConfig
from aligner.data.supervised import load_preferences, require_margins
from aligner.errors import ConfigError, check_numbers
from aligner.loop.epochs import EpochTraining, ReferenceLogprobs, check_reference
from aligner.loop.loop import Built
from aligner.losses.preference import DPOVariant, LogRatios, UserPairLoss, dpo_loss
from aligner.protocols import Loss, Policy, Reference
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe, named, resolve, text_of
from aligner.run.settings import TrainerRun, Traits, reading
from aligner.telemetry.metrics import merge, values
from aligner.types import PreferenceBatch, TokenOutputs

if TYPE_CHECKING:
    from aligner.jobs.trains import TrainerJob


@dataclass(kw_only=True, slots=True)
class PairLossConfig:
    """Settings of `aligner.losses.preference.dpo_loss` under `algorithm.`; an algorithm's config has them by inheritance."""

    # sigmoid (DPO), robust, ipo, hinge, exo, dpop, sppo, bco, nca, apo_zero, apo_down, rpo_bwd_kl, rpo_fwd_kl, rpo_sq, simpo, cpo, orpo
    loss: str = DPOVariant.sigmoid.value  # what is minimised per pair: one of docs/preferences.md, or my_file.py:function
    beta: float = 0.1  # how strongly the reference holds: of the log-ratios; of orpo: the weight of its odds ratio
    label_smoothing: float = 0.0  # the rate at which labels are taken to be wrong (loss=sigmoid: cDPO; robust, simpo, cpo; exo needs one)
    sft_coef: float | None = None  # of the chosen response's negative log-likelihood per token; None: 1 for cpo and orpo, else 0
    average_logprobs: bool | None = None  # over a response's tokens, not their sum; None: as the loss's authors do (ipo, simpo, orpo: mean)
    gamma: float = 0.0  # loss=simpo: by how much beta * the difference is to be above 0
    eta: float = 1.0  # loss=rpo_*: of the difference of the given rewards
    dpop_coef: float = 0.0  # loss=dpop: of how far the chosen response's log-prob is below the reference's

    def __post_init__(self) -> None:
        self.loss = text_of(self.loss)
        for name, is_bad, rule in self._rules():
            if is_bad:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: {rule}")

    @property
    def variant(self) -> DPOVariant | UserPairLoss:
        """The variant's requirements. A user's function is not imported: calling it raises ValueError."""
        return named("algorithm.loss", self.loss, DPOVariant) or UserPairLoss(value=self.loss, function=_not_imported)

    def resolved_loss(self) -> DPOVariant | UserPairLoss:
        """`variant` with the user's function. Raises ConfigError if that cannot be imported, or called."""
        found = resolve("algorithm.loss", self.loss, DPOVariant, ("ratios",))
        return found if isinstance(found, DPOVariant) else UserPairLoss(value=self.loss, function=found)

    def settings(self) -> dict[str, Any]:
        """The arguments of `dpo_loss` besides a batch and the model's outputs."""
        found = {one.name: getattr(self, one.name) for one in fields(PairLossConfig) if one.name != "loss"}
        return found | {"variant": self.resolved_loss()}

    def _rules(self) -> list[tuple[str, bool, str]]:
        """(setting, whether it breaks the rule, the rule)."""
        loss, smoothed = self.variant, ", ".join(variant.value for variant in DPOVariant if variant.takes_smoothing)
        return [
            ("beta", self.beta <= 0, "must be above 0"),
            ("label_smoothing", not 0 <= self.label_smoothing < 0.5, "must be at least 0 and below 0.5"),
            ("label_smoothing", self.label_smoothing > 0 and not loss.takes_smoothing, f"needs loss={smoothed}, not {loss.value}"),
            ("label_smoothing", loss is DPOVariant.exo and not self.label_smoothing, "loss=exo needs one above 0, such as 0.001"),
            ("sft_coef", self.sft_coef is not None and self.sft_coef < 0, "must not be negative"),
            ("average_logprobs", loss is DPOVariant.orpo and self.average_logprobs is False, "loss=orpo is of the odds of a mean log-prob"),
            ("gamma", self.gamma < 0, "must not be negative"),
            ("gamma", self.gamma > 0 and loss is not DPOVariant.simpo, f"needs loss=simpo, not {loss.value}"),
            ("eta", self.eta <= 0, "must be above 0"),
            ("eta", self.eta != 1 and not loss.needs_margins, f"needs loss=rpo_bwd_kl, rpo_fwd_kl or rpo_sq, not {loss.value}"),
            ("dpop_coef", self.dpop_coef < 0, "must not be negative"),
            ("dpop_coef", self.dpop_coef > 0 and loss is not DPOVariant.dpop, f"needs loss=dpop, not {loss.value}"),
            ("dpop_coef", loss is DPOVariant.dpop and not self.dpop_coef, "loss=dpop needs one above 0, such as 50"),
        ]


def _not_imported(ratios: LogRatios) -> Tensor:
    raise ValueError("the function of algorithm.loss is not imported yet")


@dataclass(kw_only=True, slots=True)
class DPOConfig(PairLossConfig):
    """Settings of DPO."""

    batch_size: int = 64  # pairs per update
    validation_batch_size: int = 64  # pairs per forward batch of a validation
    reference: ReferenceLogprobs = ReferenceLogprobs.live  # live: computed for each batch; precomputed: for all before step 1, to files
    reference_part_size: int = 1024  # precomputed: pairs per file of log-probs, what a run that is killed meanwhile computes again, at most

    def __post_init__(self) -> None:
        PairLossConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("batch_size", "validation_batch_size"))
        check_reference(self.reference, self.reference_part_size, is_needed=self.variant.needs_reference, loss=self.variant.value)

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the weights is there while the policy is trained."""
        return self.variant.needs_reference and self.reference is ReferenceLogprobs.live

    @property
    def reports(self) -> list[str]:
        """The names of the metrics that a validation gives."""
        names = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"]
        is_supervised = self.variant.sft_coef if self.sft_coef is None else self.sft_coef
        return [f"validation/{name}" for name in names + ["sft_loss"] * bool(is_supervised)]


class DPO(EpochTraining[DPOConfig, PreferencePair, PreferenceBatch, Policy]):
    """`reference`: None if the loss needs none, or the pairs bring its log-probs. Raises DataError if the loss learns how much better a
    response is, and no training pair says that.
    """

    computes = "ref_logprobs"  # takes no time without a reference

    def __init__(self, config: DPOConfig, policy: Policy, reference: Reference | None, **data: Any) -> None:
        if config.keeps_reference != (reference is not None):
            what = f"the loss {config.variant.value} {'needs one' if reference is None else 'has none'}"
            raise ValueError(f"reference is {reference}: {what} (algorithm.reference={config.reference.value})")
        super().__init__(config, policy, **data)
        self.reference = reference
        self._loss = partial(dpo_loss, **config.settings())
        self._held_out: list[PreferenceBatch] = []  # with the reference's log-probs, from the first validation on

    def check(self) -> None:
        if self.config.variant.needs_margins:
            require_margins(self.train, f"algorithm.loss={self.config.variant.value}")

    @property
    def loss(self) -> Loss[PreferenceBatch]:
        return self._loss

    def collate(self, examples: Sequence[PreferencePair]) -> PreferenceBatch:
        batch = preference_batch(examples, self.pad_id)
        return batch if self.reference is None else replace(batch, ref_logprobs=self.reference.logprobs(batch))

    def validate(self) -> Mapping[str, float]:
        """Loss and metrics on the validation pairs, as `validation/*`."""
        self._held_out = self._held_out or list(self.held_out())
        parts = [self.loss(TokenOutputs(logprobs=self.model.logprobs(batch)), batch).metrics for batch in self._held_out]
        return {name.replace("preference/", "validation/"): value for name, value in values(merge(parts)).items()}


COLUMNS = (
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("chosen", "preference/chosen_logprob", ".3f"),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)


@dataclass(kw_only=True, slots=True)
class TrainDPO(TrainerRun):
    """Direct preference optimisation on pairs (conf/dpo/dpo.yaml)."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: DPOConfig = field(default_factory=DPOConfig)
    read = reading(load_preferences)
    has_frozen_start = True

    def traits(self) -> Traits:
        return self.batch_traits(unit=2, has_reference=self.algorithm.keeps_reference)


def build(job: TrainerJob[TrainDPO]) -> Built | None:
    """The reference, if the loss has one, is the model that the run starts from."""
    settings = job.config.algorithm
    train, validation = job.load(load_preferences)
    policy = job.policy()
    job.describe(train, policy.model)
    reference = job.reference(policy) if settings.keeps_reference else None
    if settings.variant.needs_reference and not job.session.directory.metrics.exists():
        job.session.say("policy and reference are the same before the first update: all pairs of step 1 tie (accuracy 0%, margin 0)")
    if settings.reference is ReferenceLogprobs.precomputed:
        stored = job.with_reference(policy, {"train": train, "validation": validation})
        if stored is None:
            return None
        train, validation = stored
    return Built(algorithm=DPO(settings, policy, reference, train=train, validation=validation, **job.common), model=policy.model)


RECIPE = Recipe(name="dpo", config=TrainDPO, build=build, columns=COLUMNS)
