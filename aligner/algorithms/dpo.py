"""Direct preference optimisation (Rafailov et al. 2023, 2305.18290) and its variants of `aligner.losses.preference`.

One step: a batch of pairs of responses; the frozen reference's log-probs of both; one update of the policy on

    -log sigma(beta ((l_chosen - ref_chosen) - (l_rejected - ref_rejected)))

Against a reward model with PPO (`reward_model.py`, `ppo.py`): the same pairs, but the reward is implicit, beta log(pi / ref), so that
nothing is sampled and no critic is learnt. Against `sft.py`: the rejected response pushes back, the reference holds in place.

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
from aligner.data.preferences import PreferencePair
from aligner.errors import ConfigError
from aligner.losses.preference import SMOOTHED, DPOVariant, dpo_loss
from aligner.metrics import Metrics, merge, values
from aligner.protocols import Policy
from aligner.types import PreferenceBatch, TokenOutputs


@dataclass(kw_only=True, slots=True)
class DPOConfig:
    """Settings of DPO."""

    batch_size: int = 64  # pairs per update
    validation_batch_size: int = 64
    loss: DPOVariant = DPOVariant.sigmoid
    beta: float = 0.1  # how strongly the reference holds: of the log-ratios
    label_smoothing: float = 0.0  # the rate at which labels are taken to be wrong (loss=sigmoid: cDPO; loss=robust)
    sft_coef: float = 0.0  # of the chosen response's negative log-likelihood per token

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.validation_batch_size < 1:
            raise ConfigError(
                f"algorithm.batch_size={self.batch_size}, validation_batch_size={self.validation_batch_size}: must be at least 1"
            )
        if self.beta <= 0:
            raise ConfigError(f"algorithm.beta={self.beta}: must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"algorithm.label_smoothing={self.label_smoothing}: must be at least 0 and below 0.5")
        if self.label_smoothing and self.loss not in SMOOTHED:
            allowed = " or ".join(variant.value for variant in SMOOTHED)
            raise ConfigError(f"algorithm.label_smoothing={self.label_smoothing}: needs loss={allowed}, not {self.loss.value}")
        if self.sft_coef < 0:
            raise ConfigError(f"algorithm.sft_coef={self.sft_coef}: must not be negative")


class Reference(Protocol):
    """The frozen policy that the log-ratios are taken against."""

    def logprobs(self, batch: PreferenceBatch) -> Tensor:
        """As `Policy.logprobs`."""


class DPO:
    """The algorithm over its parts. Every rank constructs one."""

    def __init__(
        self,
        config: DPOConfig,
        policy: Policy,
        reference: Reference,
        *,
        train: Sequence[PreferencePair],
        validation: Sequence[PreferencePair],
        pad_id: int,
        seed: int,
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.train = train
        self.pad_id = pad_id
        self.order = EpochSampler(len(train), config.batch_size, seed)
        self.loss = partial(
            dpo_loss, beta=config.beta, variant=config.loss, label_smoothing=config.label_smoothing, sft_coef=config.sft_coef
        )
        size = config.validation_batch_size
        self._held_out = [validation[start : start + size] for start in range(0, len(validation), size)]
        self._validation: list[PreferenceBatch] = []  # with the reference's log-probs, from the first validation on

    def step(self, step: int, clock: Clock) -> StepResult:
        pairs = [self.train[i] for i in self.order.indices(step - 1)]
        with clock.phase("ref_logprobs"):
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
        return replace(batch, ref_logprobs=self.reference.logprobs(batch))

    def _judge(self, batch: PreferenceBatch) -> Metrics:
        return self.loss(TokenOutputs(logprobs=self.policy.logprobs(batch)), batch).metrics
