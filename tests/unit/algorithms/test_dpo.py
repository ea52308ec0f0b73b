"""DPO on fakes: what a step asks of its parts, validation by hand, and the config's checks."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.dpo import DPO, DPOConfig
from aligner.data.collate import PreferencePair, SupervisedExample
from aligner.errors import DataError
from aligner.loop.loop import Clock
from aligner.losses.preference import DPOVariant


def row(*response: int) -> SupervisedExample:
    """The prompt token 1 and a response."""
    return SupervisedExample(tokens=(1, *response), loss_mask=(False, *[True] * len(response)), source="test:1")


def pair(chosen: tuple[int, ...], rejected: tuple[int, ...]) -> PreferencePair:
    return PreferencePair(chosen=row(*chosen), rejected=row(*rejected), margin=0.0)


PAIRS = [pair((5,), (6, 6)), pair((7, 7), (8,)), pair((9,), (10,))]


def dpo(fakes, log=None, *, policy=None, reference=None, validation=(), **config) -> DPO:
    log = [] if log is None else log
    settings = DPOConfig(**({"batch_size": 2, "validation_batch_size": 2} | config))
    return DPO(
        settings,
        policy or fakes.FakePolicy(log),
        (reference or fakes.FakePolicy(log, level=-1.5)) if settings.variant.needs_reference else None,
        train=PAIRS,
        validation=validation,
        pad_id=0,
        seed=1,
    )


def test_a_step_trains_on_one_batch_with_the_references_log_probs(fakes) -> None:
    log: list[str] = []
    algorithm = dpo(fakes, log)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["logprobs", "update"]  # the reference's, then one update: the policy itself needs no pass without gradient
    (batch,) = algorithm.model.trained
    assert batch.tokens.shape[0] == 4  # two pairs
    chosen = {example.chosen.tokens for example in PAIRS}
    assert all(tuple(tokens[:length].tolist()) in chosen for tokens, length in zip(batch.tokens[::2], batch.lengths[::2], strict=True))
    torch.testing.assert_close(batch.ref_logprobs, -1.5 * batch.loss_mask)
    assert metrics["optim/steps"] == 1 and metrics["data/epoch"] == pytest.approx(2 / 3) and metrics["data/tokens_per_second"] > 0


def test_a_loss_without_a_reference_asks_for_none(fakes) -> None:
    algorithm = dpo(fakes, log := [], loss=DPOVariant.simpo, validation=PAIRS)
    assert algorithm.reference is None
    algorithm.step(1, Clock())
    assert log == ["update"] and algorithm.model.trained[0].ref_logprobs is None
    assert algorithm.validate()["validation/margin"] == 0.0  # the fake's log-probs are all -1, and so are their means
    parts = {"train": PAIRS, "validation": [], "pad_id": 0, "seed": 1}
    with pytest.raises(ValueError, match="the loss simpo has none"):
        DPO(DPOConfig(loss=DPOVariant.simpo), fakes.FakePolicy([]), fakes.FakePolicy([]), **parts)
    with pytest.raises(ValueError, match="the loss ipo needs one"):
        DPO(DPOConfig(loss=DPOVariant.ipo), fakes.FakePolicy([]), None, **parts)


def test_rewards_that_a_loss_learns_from_must_be_in_the_data(fakes) -> None:
    with pytest.raises(DataError, match=r"algorithm\.loss=rpo_sq needs records with chosen_reward .* none of the 3 pairs of data\.train"):
        dpo(fakes, loss=DPOVariant.rpo_sq)


def test_a_step_counts_the_pairs_that_it_learnt_from(fakes) -> None:
    metrics = dpo(fakes).step(1, Clock()).metrics
    assert metrics["learnt/samples"] == metrics["learnt/samples_seen"] == DPOConfig(batch_size=2).batch_size
    assert metrics["learnt/tokens"] == metrics["learnt/tokens_seen"] > 0


def test_validation_by_hand(fakes) -> None:
    """Reference log-probs -1.5 a token, the policy's -token / 10. l - ref: 1.0, 1.8 | 1.6, 0.7 | 0.6, 0.5: D = -0.8, 0.9, 0.1."""
    algorithm = dpo(fakes, policy=fakes.TokenPolicy(), validation=PAIRS, beta=0.5)
    metrics = algorithm.validate()
    assert metrics["validation/accuracy"] == pytest.approx(2 / 3)
    assert metrics["validation/margin"] == pytest.approx(0.5 * 0.2 / 3)
    assert metrics["validation/loss"] == pytest.approx(sum(math.log1p(math.exp(-0.5 * d)) for d in (-0.8, 0.9, 0.1)) / 3)
    assert dpo(fakes).validate() == {}


def test_the_references_log_probs_of_validation_pairs_are_computed_once(fakes) -> None:
    policy, reference = fakes.TokenPolicy(), fakes.TokenPolicy()
    algorithm = dpo(fakes, policy=policy, reference=reference, validation=PAIRS)
    first, second = algorithm.validate(), algorithm.validate()
    assert first == second and first["validation/loss"] == pytest.approx(math.log(2))
    assert (reference.num_passes, policy.num_passes) == (2, 4)  # two batches
