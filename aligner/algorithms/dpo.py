"""Direct preference optimisation (Rafailov et al. 2023, 2305.18290) and its kin: every loss of `aligner.losses.pairs`.

One step: a batch of pairs of responses; the frozen reference's log-probs of both; one update of the policy on

    -log sigma(beta ((l_chosen - ref_chosen) - (l_rejected - ref_rejected)))

Against a reward model with PPO (`reward_model.py`, `ppo.py`): the same pairs, but the reward is implicit, beta log(pi / ref), so that
nothing is sampled and no critic is learnt. Against `sft.py`: the rejected response pushes back, the reference holds in place. Losses
without a reference (SimPO, CPO, ORPO) make one pass less per step, and keep no second copy of the weights.

The reference's log-probs of a pair never change. They are computed batch by batch all the same: the pass has no backward half, and a stored
copy would be made anew after a resume, in batches of another shape and so with other last bits. Validation batches are always the same
ones, so theirs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from aligner.algorithms.loop import Clock, StepResult
from aligner.data.collate import preference_batch
from aligner.data.loader import EpochSampler
from aligner.data.preferences import PreferencePair, require_margins
from aligner.errors import ConfigError
from aligner.losses.pairs import DPOVariant
from aligner.losses.preference import dpo_loss
from aligner.metrics import Metrics, merge, values
from aligner.protocols import Policy
from aligner.types import PreferenceBatch, TokenOutputs


@dataclass(kw_only=True, slots=True)
class PairLossConfig:
    """Settings of `aligner.losses.preference.dpo_loss` under `algorithm.`; an algorithm's config has them by inheritance."""

    loss: DPOVariant = DPOVariant.sigmoid
    beta: float = 0.1  # how strongly the reference holds: of the log-ratios; of orpo: the weight of its odds ratio
    label_smoothing: float = 0.0  # the rate at which labels are taken to be wrong (loss=sigmoid: cDPO; robust, simpo, cpo; exo needs one)
    sft_coef: float | None = None  # of the chosen response's negative log-likelihood per token; None: 1 for cpo and orpo, else 0
    average_logprobs: bool | None = None  # over a response's tokens, not their sum; None: as the loss's authors do (ipo, simpo, orpo: mean)
    gamma: float = 0.0  # loss=simpo: by how much beta * the difference is to be above 0
    eta: float = 1.0  # loss=rpo_*: of the difference of the given rewards
    dpop_coef: float = 0.0  # loss=dpop: of how far the chosen response's log-prob is below the reference's

    def __post_init__(self) -> None:
        for name, is_bad, rule in self._rules():
            if is_bad:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: {rule}")

    def settings(self) -> dict[str, Any]:
        """The arguments of `dpo_loss` besides a batch and the model's outputs."""
        return {
            "beta": self.beta,
            "variant": self.loss,
            "label_smoothing": self.label_smoothing,
            "sft_coef": self.sft_coef,
            "average_logprobs": self.average_logprobs,
            "gamma": self.gamma,
            "eta": self.eta,
            "dpop_coef": self.dpop_coef,
        }

    def _rules(self) -> list[tuple[str, bool, str]]:
        """(setting, whether it breaks the rule, the rule)."""
        loss, smoothed = self.loss, ", ".join(variant.value for variant in DPOVariant if variant.takes_smoothing)
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


@dataclass(kw_only=True, slots=True)
class DPOConfig(PairLossConfig):
    """Settings of DPO."""

    batch_size: int = 64  # pairs per update
    validation_batch_size: int = 64

    def __post_init__(self) -> None:
        PairLossConfig.__post_init__(self)
        if self.batch_size < 1 or self.validation_batch_size < 1:
            raise ConfigError(
                f"algorithm.batch_size={self.batch_size}, validation_batch_size={self.validation_batch_size}: must be at least 1"
            )

    @property
    def reports(self) -> list[str]:
        """The names of the metrics that a validation gives."""
        names = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"]
        is_supervised = self.loss.sft_coef if self.sft_coef is None else self.sft_coef
        return [f"validation/{name}" for name in names + ["sft_loss"] * bool(is_supervised)]


class Reference(Protocol):
    """The frozen policy that the log-ratios are taken against."""

    def logprobs(self, batch: PreferenceBatch) -> Tensor:
        """As `Policy.logprobs`."""


class DPO:
    """The algorithm over its parts. Every rank constructs one. `reference`: None where the loss needs none.

    Raises DataError where the loss learns how much better a response is, and no training pair says that.
    """

    def __init__(
        self,
        config: DPOConfig,
        policy: Policy,
        reference: Reference | None,
        *,
        train: Sequence[PreferencePair],
        validation: Sequence[PreferencePair],
        pad_id: int,
        seed: int,
    ) -> None:
        if config.loss.needs_reference != (reference is not None):
            raise ValueError(f"reference is {reference}: the loss {config.loss.value} {'needs one' if reference is None else 'has none'}")
        if config.loss.needs_margins:
            require_margins(train, f"algorithm.loss={config.loss.value}")
        self.config = config
        self.policy = policy
        self.reference = reference
        self.train = train
        self.pad_id = pad_id
        self.order = EpochSampler(len(train), config.batch_size, seed)
        self.loss = partial(dpo_loss, **config.settings())
        size = config.validation_batch_size
        self._held_out = [validation[start : start + size] for start in range(0, len(validation), size)]
        self._validation: list[PreferenceBatch] = []  # with the reference's log-probs, from the first validation on

    def step(self, step: int, clock: Clock) -> StepResult:
        pairs = [self.train[i] for i in self.order.indices(step - 1)]
        with clock.phase("ref_logprobs"):  # as short as making a batch where there is no reference
            batch = self._with_reference(pairs)
        with clock.phase("train"):
            metrics = values(self.policy.train_step(batch, self.loss))
        metrics["data/tokens_per_second"] = int(batch.lengths.sum()) / (clock.seconds["time/ref_logprobs"] + clock.seconds["time/train"])
        return StepResult(metrics=metrics | {"data/epoch": self.order.epoch(step)})

    def validate(self) -> Mapping[str, float]:
        """The loss and what goes with it on the validation pairs, as `validation/*`."""
        if not self._validation:
            self._validation = [self._with_reference(pairs) for pairs in self._held_out]
        parts = [self._judge(batch) for batch in self._validation]
        return {name.replace("preference/", "validation/"): value for name, value in values(merge(parts)).items()}

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is no state besides the model and the step number."""

    def _with_reference(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        batch = preference_batch(pairs, self.pad_id)
        return batch if self.reference is None else replace(batch, ref_logprobs=self.reference.logprobs(batch))

    def _judge(self, batch: PreferenceBatch) -> Metrics:
        return self.loss(TokenOutputs(logprobs=self.policy.logprobs(batch)), batch).metrics
