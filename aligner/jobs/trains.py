"""The job of a recipe that trains on data: the argument of its `build`, and the code around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from aligner.cluster.outcomes import ExitCode
from aligner.data.order import EpochSampler, order_of
from aligner.data.report import LoadReport
from aligner.data.stored import row_counts
from aligner.data.tokenizer import Tokenizer
from aligner.jobs.parts import length_of, load_model_files, load_sets, run_tokenizer, train_to_end, with_lengths
from aligner.jobs.sources import pinned, pinned_base
from aligner.jobs.stored_reference import with_reference
from aligner.loop.loop import Built
from aligner.models import create
from aligner.models.config import Architecture
from aligner.models.modules.scalar_head import ScalarHead
from aligner.models.training.guard import Guard
from aligner.models.training.placement import Splits, input_shape
from aligner.models.training.policy import MegatronPolicy, MegatronRewardModel, ReferencePolicy
from aligner.models.training.trainable import TrainableModel, Training
from aligner.parallel.micro_batches import MicroBatching, plan
from aligner.run.recipe import Recipe
from aligner.run.session import Session, open_session
from aligner.run.settings import TrainerRun

C = TypeVar("C", bound=TrainerRun)
Example = TypeVar("Example")
NUM_STEPS = 20  # whose batches are looked at before the first one
MUCH_PADDING = 0.15


@dataclass(kw_only=True, slots=True)
class TrainerJob(Generic[C]):
    """What a recipe's algorithm is made of, on one rank; `config` has every length and number of steps, and the original model."""

    session: Session
    config: C
    tokenizer: Tokenizer
    architecture: Architecture
    length: str = ""  # of the whole run, in words, once the data are read

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of every algorithm on data: the padding id and the seed."""
        return {"pad_id": self.tokenizer.pad_id, "seed": self.config.run.seed}

    def load(
        self, load: Callable[[str, Any, Tokenizer], tuple[Sequence[Example], LoadReport]]
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """(training examples, validation examples); prints what was left out. Raises DataError listing all bad lines."""
        train, validation = load_sets(self.session, load, self.config.data, self.tokenizer)
        order = order_of(train, self.config.algorithm.batch_size, self.config.run.seed)
        self.config = replace(self.config, loop=self.config.loop.over(order))
        order.check(steps := self.config.loop.max_steps)
        tokens = row_counts(train)[..., 0].sum() / order.size * steps * order.batch_size
        self.length = length_of(self.config, order, f"about {tokens:,.0f} tokens")
        return train, validation

    def policy(self, *, neftune_alpha: float = 0.0) -> MegatronPolicy:
        """The language model that is trained."""
        how = self._training(neftune_alpha=neftune_alpha)
        return create.create_policy(self.config.model, self.architecture, self.config.parallel, self.session.topology, how)

    def reward_model(self, head: ScalarHead) -> MegatronRewardModel:
        """The model with a scalar head that is trained."""
        layout = self.session.topology
        return create.create_reward_model(self.config.model, self.architecture, self.config.parallel, layout, self._training(), head=head)

    def reference(self, policy: MegatronPolicy) -> ReferencePolicy:
        """A frozen copy of the current policy, before a resumed run loads its checkpoint."""
        return ReferencePolicy(policy)

    def with_reference(self, policy: MegatronPolicy, sets: Mapping[str, Any]) -> list[Sequence[Any]] | None:
        """The examples of each set (`stored_reference`) with log-probs of `policy`; None if the run is to stop before all are computed."""
        return with_reference(self.session, self.config, policy, self.tokenizer, sets)

    def describe(self, examples: Sequence[Any], model: TrainableModel) -> None:
        """Print a line on the training rows and their batches."""
        self.session.say(batches_of(examples, self.config, model))

    def _training(self, *, neftune_alpha: float = 0.0) -> Training:
        config = self.config
        return create.training(
            config.model,
            config.optimizer,
            total_steps=config.loop.max_steps,
            guard=Guard(config.guard),
            vision=self.tokenizer.vision,
            neftune_alpha=neftune_alpha,
        )


def train(recipe: Recipe, config: TrainerRun) -> int:
    """Run a recipe that trains on data; the exit code. Every rank calls it."""
    with open_session(config, config.run, config.parallel, component=recipe.component or recipe.name, recipe=recipe.name) as session:
        pin = pinned if config.has_frozen_start else pinned_base
        config = replace(config, model=pin(session, "model", config.model))
        config.check_complete()
        tokenizer, architecture = load_model_files(config.model, config.data, session)
        config.check(architecture, session.topology.world_size)
        job = TrainerJob(session=session, config=with_lengths(config), tokenizer=tokenizer, architecture=architecture)
        built: Built | None = recipe.build(job)
        if built is None:
            return ExitCode.stopped
        code = train_to_end(
            session, job.config, built, tokenizer=run_tokenizer(session, config, config.model), shown=recipe.columns, length=job.length
        )
    return code


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStatistics:
    """Averages per batch over the first steps, over all replicas."""

    tokens: float  # of the rows
    slots: float  # that the model computes
    passes: float  # micro-batches of the replica that has most

    @property
    def padding(self) -> float:
        """Fraction of slots without a token."""
        return 1 - self.tokens / self.slots


def batch_statistics(
    lengths: Sequence[int], order: EpochSampler, micro_batches: MicroBatching, splits: Splits, *, num_replicas: int, unit: int = 1
) -> BatchStatistics:
    """Plans the first batches as training does. `lengths` has `unit` neighbouring rows for each example of `order`."""
    tokens = slots = passes = 0
    steps = min(NUM_STEPS, order.steps_of(1))
    for step in range(steps):
        rows = [int(lengths[unit * example + offset]) for example in order.indices(step) for offset in range(unit)]
        layout = plan(rows, micro_batches, num_replicas=num_replicas, unit=unit, multiple=splits.row_multiple)
        shapes = [input_shape([rows[number] for number in part], splits) for replica in layout for part in replica]
        tokens += sum(rows)
        slots += sum(height * width for height, width in shapes)
        passes += max(len(replica) for replica in layout)
    return BatchStatistics(tokens=tokens / steps, slots=slots / steps, passes=passes / steps)


def batches_of(examples: Sequence[Any], config: TrainerRun, model: TrainableModel) -> str:
    """One line on the training rows and their batches."""
    counts = row_counts(examples)
    unit, lengths = counts.shape[1], counts[..., 0].reshape(-1)
    order = order_of(examples, config.algorithm.batch_size, config.run.seed)
    found = batch_statistics(lengths, order, model.micro_batches, model.splits, num_replicas=model.topology.dp_size, unit=unit)
    line = (
        f"{len(lengths):,} rows of {lengths.min()} to {lengths.max()} tokens, {lengths.sum():,} in all, {counts[..., 1].sum():,} learnt; "
        f"a batch of {order.batch_size * unit} rows: {found.tokens:,.0f} tokens in {found.passes:.1f} passes, {found.padding:.1%} padding"
    )
    if found.padding <= MUCH_PADDING or model.splits.packed:
        return line
    if not model.micro_batches.tokens:
        return f"{line} (less with model.micro_batch_tokens, which puts rows of like length together, and none with model.packing=true)"
    return f"{line} (none with model.packing=true)"
