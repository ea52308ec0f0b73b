"""What a run's batches will look like in the model: said at the start, where padding is cheap to avoid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.data.loader import EpochSampler
from aligner.data.supervised import SupervisedExample
from aligner.models.placement import Splits, input_shape
from aligner.models.trainable import TrainableModel
from aligner.parallel.micro_batches import MicroBatching, plan
from aligner.schemas import TrainDPO, TrainRewardModel, TrainSFT

NUM_STEPS = 20  # that are looked at
MUCH_PADDING = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStatistics:
    """Of the first steps: what one batch is on average, over all replicas."""

    tokens: float  # of the rows
    slots: float  # that the model computes
    passes: float  # micro-batches of the replica that has most

    @property
    def padding(self) -> float:
        """The part of the slots that holds no token."""
        return 1 - self.tokens / self.slots


def batch_statistics(
    lengths: Sequence[int], order: EpochSampler, micro_batches: MicroBatching, splits: Splits, *, num_replicas: int, unit: int = 1
) -> BatchStatistics:
    """Plans the first batches as training does. `lengths` has `unit` neighbouring rows for each example of `order`."""
    tokens = slots = passes = 0
    steps = min(NUM_STEPS, order.steps_per_epoch())
    for step in range(steps):
        rows = [lengths[unit * example + offset] for example in order.indices(step) for offset in range(unit)]
        layout = plan(rows, micro_batches, num_replicas=num_replicas, unit=unit, multiple=splits.row_multiple)
        shapes = [input_shape([rows[number] for number in part], splits) for replica in layout for part in replica]
        tokens += sum(rows)
        slots += sum(height * width for height, width in shapes)
        passes += max(len(replica) for replica in layout)
    return BatchStatistics(tokens=tokens / steps, slots=slots / steps, passes=passes / steps)


def batches_of(
    rows: Sequence[SupervisedExample], config: TrainSFT | TrainRewardModel | TrainDPO, model: TrainableModel, *, unit: int = 1
) -> str:
    """One line on the training rows and their batches; `unit` neighbouring rows are one example."""
    lengths = [len(row.tokens) for row in rows]
    learnt = sum(sum(row.loss_mask) for row in rows)
    order = EpochSampler(len(rows) // unit, config.algorithm.batch_size, config.run.seed)
    found = batch_statistics(lengths, order, model.micro_batches, model.splits, num_replicas=model.topology.dp_size, unit=unit)
    line = (
        f"{len(rows):,} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all, {learnt:,} learnt; a batch of "
        f"{order.batch_size * unit} rows: {found.tokens:,.0f} tokens in {found.passes:.1f} passes, {found.padding:.1%} padding"
    )
    if found.padding <= MUCH_PADDING or model.splits.packed:
        return line
    if not model.micro_batches.tokens:
        return f"{line} (less with model.micro_batch_tokens, which puts rows of like length together, and none with model.packing=true)"
    return f"{line} (none with model.packing=true)"
