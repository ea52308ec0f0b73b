from __future__ import annotations

import pytest

from aligner.data.order import EpochSampler
from aligner.errors import ConfigError


def stream(sampler: EpochSampler, steps: int) -> list[int]:
    return [i for step in range(steps) for i in sampler.indices(step)]


def test_every_epoch_holds_every_example_once_although_batches_straddle():
    drawn = stream(EpochSampler(size=10, batch_size=4, seed=3), 10)  # 40 draws: 4 epochs of 10, the third batch straddles
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # each epoch has its own order


def test_any_order_and_any_instance_give_the_same_steps():
    first = EpochSampler(size=7, batch_size=3, seed=1)
    forward = [first.indices(step) for step in range(9)]
    assert [first.indices(step) for step in reversed(range(9))] == forward[::-1]
    assert [EpochSampler(size=7, batch_size=3, seed=1).indices(step) for step in range(9)] == forward


def test_seeds_differ_and_a_batch_may_exceed_the_set():
    assert EpochSampler(size=50, batch_size=50, seed=0).indices(0) != EpochSampler(size=50, batch_size=50, seed=1).indices(0)
    assert sorted(EpochSampler(size=2, batch_size=6, seed=0).indices(1)) == [0, 0, 0, 1, 1, 1]


def test_the_permutation_is_pinned():
    """A changed generator would silently repeat and skip examples of a resumed run."""
    assert EpochSampler(size=8, batch_size=8, seed=5).indices(0) == [2, 4, 3, 1, 5, 0, 6, 7]


def test_epochs_and_steps():
    sampler = EpochSampler(size=10, batch_size=4, seed=0)
    assert sampler.epoch(5) == 2.0 and sampler.steps_of(1) == 3
    assert [sampler.steps_of(epochs) for epochs in (0.01, 0.4, 0.8, 0.81, 2, 4.4)] == [1, 1, 2, 3, 5, 11]


@pytest.mark.parametrize(("field", "value"), [("size", 0), ("batch_size", 0), ("seed", -1)])
def test_impossible_sizes(field, value):
    with pytest.raises(ConfigError, match=f"^{field}={value}: must be at least"):
        EpochSampler(**{"size": 4, "batch_size": 2, "seed": 0, field: value})
    with pytest.raises(ValueError, match="step is -1"):
        EpochSampler(size=4, batch_size=2, seed=0).indices(-1)
