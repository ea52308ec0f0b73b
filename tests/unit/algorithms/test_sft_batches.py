"""SFT batches as the job makes them: packed and padded give the same loss, gradient and update, and what is said of them at the start."""

from __future__ import annotations

import pytest
import torch

from aligner.algorithms.sft import SFT, SFTConfig
from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.order import EpochSampler
from aligner.jobs.trains import batch_statistics
from aligner.loop.loop import Clock
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.placement import Splits
from aligner.parallel.micro_batches import MicroBatching

PACKED = {"micro_batch_tokens": 48, "packing": True}


def conversations(count: int) -> list[SupervisedExample]:
    """Rows of several lengths; two runs of learnt tokens in each, as of a conversation."""
    draw, found = torch.Generator().manual_seed(4), []
    for number in range(count):
        tokens = torch.randint(1, 60, (int(torch.randint(6, 22, (1,), generator=draw)),), generator=draw).tolist()
        half = len(tokens) // 2
        mask = tuple(2 <= i < half or i > half + 1 for i in range(len(tokens)))
        found.append(SupervisedExample(tokens=tuple(tokens), loss_mask=mask, source=f"d:{number}"))
    return found


def test_packed_rows_give_the_padded_ones_loss_gradient_and_update(make_model):
    """A packed row sees no other one, and its positions begin at 0: its log-probs are those that it has alone."""
    examples, results = conversations(10), []
    for training in ({"micro_batch_size": 10}, {"micro_batch_size": 3}, PACKED):
        policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), training=training)
        logprobs = policy.logprobs(supervised_batch(examples, 0))
        sft = SFT(SFTConfig(batch_size=10, validation_batch_size=4), policy, train=examples, validation=examples, pad_id=0, seed=3)
        metrics = sft.step(1, Clock()).metrics
        weights = torch.cat([parameter.detach().flatten() for parameter in policy.model.module.parameters()])
        results.append((logprobs, metrics["sft/loss"], metrics["optim/grad_norm"], sft.validate()["validation/loss"], weights))
    (logprobs, loss, norm, validation, weights), *others = results
    policy = make_model("policy")
    for row, example in enumerate(examples):
        alone = policy.logprobs(supervised_batch([example], 0))[0]
        torch.testing.assert_close(logprobs[row, : len(example.tokens)], alone, rtol=0, atol=1e-5)
    for other in others:
        torch.testing.assert_close(other[0], logprobs, rtol=0, atol=1e-5)
        assert other[1:4] == pytest.approx((loss, norm, validation), rel=1e-5)
        torch.testing.assert_close(other[4], weights, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("micro_batches", "packed", "slots", "passes"),
    [
        (MicroBatching(rows=2), False, 2 * 6 + 2 * 8, 2),  # [2, 6] and [3, 8], padded to the longer one
        (MicroBatching(rows=4), False, 4 * 8, 1),
        (MicroBatching(tokens=16), False, 2 * 8 + 2 * 3, 2),  # 8 and 6 together, 3 and 2
        (MicroBatching(tokens=16, packed=True), True, 19, 2),
    ],
)
def test_statistics_by_hand(micro_batches, packed, slots, passes):
    order = EpochSampler(4, 4, seed=1, shuffle=False)
    found = batch_statistics([2, 6, 3, 8], order, micro_batches, Splits(packed=packed), num_replicas=1)
    assert (found.tokens, found.slots, found.passes) == (19, slots, passes) and found.padding == pytest.approx(1 - 19 / slots)


def test_statistics_of_pairs_and_replicas():
    order = EpochSampler(2, 2, seed=1, shuffle=False)
    found = batch_statistics([2, 6, 3, 8], order, MicroBatching(rows=1), Splits(), num_replicas=2, unit=2)
    assert (found.slots, found.passes) == (2 * 6 + 2 * 8, 1)  # a pair for each replica
