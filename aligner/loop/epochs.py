"""Training on an existing data set: each step takes the next batch of an endless sequence of epochs and makes one update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from aligner.data.order import order_of
from aligner.errors import ConfigError, check_numbers
from aligner.loop.learnt import of_lengths, of_mask
from aligner.loop.loop import Clock, StepResult
from aligner.protocols import Loss, Policy, Trainable
from aligner.telemetry.metrics import values
from aligner.types import MaskedBatch, PreferenceBatch

Example = TypeVar("Example")
Model = TypeVar("Model", bound=Trainable)
Collated = TypeVar("Collated", bound=MaskedBatch)
Config = TypeVar("Config", bound=Any)  # with batch_size and validation_batch_size


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """Sizes of batches under `algorithm.`; an algorithm's config has them by inheritance."""

    batch_size: int = 64  # examples per update
    validation_batch_size: int = 64  # examples per forward batch of a validation

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", at_least_1=("batch_size", "validation_batch_size"))


class ReferenceLogprobs(str, Enum):
    """When they are computed."""

    live = "live"  # for every batch, by a frozen copy of the weights in host memory
    precomputed = "precomputed"  # for all examples before the first step, to files; no copy is kept


def check_reference(reference: ReferenceLogprobs, part_size: int, *, is_needed: bool, loss: str) -> None:
    """Raise ConfigError for a setting that the loss does not read, or an empty file."""
    if part_size < 1:
        raise ConfigError(f"algorithm.reference_part_size={part_size}: must be at least 1")
    if reference is ReferenceLogprobs.precomputed and not is_needed:
        raise ConfigError(f"algorithm.reference={reference.value}: loss={loss} has no reference; allowed: {ReferenceLogprobs.live.value}")


def mean_loss(policy: Policy, batches: Iterable[MaskedBatch]) -> dict[str, float]:
    """The mean token cross-entropy of these batches, as validation/loss; empty if they have no token to learn."""
    total, count = 0.0, 0
    for batch in batches:
        total -= policy.logprobs(batch).double().sum().item()
        count += int(batch.loss_mask.sum())
    return {"validation/loss": total / count} if count else {}


class Stateless:
    """The state methods of `aligner.loop.loop.Algorithm` for one that depends only on model and step number."""

    def finish(self) -> None:
        """Nothing runs after a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is no state besides the model and the step number."""


@dataclass(eq=False)
class EpochTraining(Stateless, ABC, Generic[Config, Example, Collated, Model]):
    """Base of algorithms of epochs: subclasses define `collate`, `loss`, `validate`. `computes`: the phase of a pass in `collate`."""

    computes: ClassVar[str] = ""

    config: Config
    model: Model
    _: KW_ONLY
    train: Sequence[Example]
    validation: Sequence[Example]
    pad_id: int
    seed: int

    def __post_init__(self) -> None:
        self.order = order_of(self.train, self.config.batch_size, self.seed)
        self.check()

    def check(self) -> None:
        """Raise ConfigError or DataError if the examples do not fit the settings."""

    @property
    @abstractmethod
    def loss(self) -> Loss[Collated]:
        """Of a batch."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> Collated:
        """A batch of examples."""

    @abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Metrics on the validation examples; empty without any."""

    def step(self, step: int, clock: Clock) -> StepResult:
        with clock.phase(self.computes or "read"):
            batch = self.collate(self.examples_of(step))
        with clock.phase("train"):
            metrics = values(self.model.train_step(batch, self.loss))
        seconds = clock.seconds.get(f"time/{self.computes}", 0.0) + clock.seconds["time/train"]
        found = of_lengths(batch.lengths, seconds) | of_mask(batch.loss_mask, unit=2 if isinstance(batch, PreferenceBatch) else 1)
        return StepResult(metrics=metrics | found | self.order.metrics(step))

    def examples_of(self, step: int) -> list[Example]:
        """Examples of `step` (from 1)."""
        return [self.train[i] for i in self.order.indices(step - 1)]

    def held_out(self) -> Iterator[Collated]:
        """The validation examples in batches, in their order."""
        size = self.config.validation_batch_size
        for start in range(0, len(self.validation), size):
            yield self.collate([self.validation[row] for row in range(start, min(start + size, len(self.validation)))])
