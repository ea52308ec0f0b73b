"""SteerLM 2: weights and the update's gradient by hand."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.steerlm2 import Proposal, SteerLM2, SteerLM2Config
from aligner.data.collate import SupervisedExample
from aligner.data.proposals import ProposedGroup
from aligner.errors import DataError
from aligner.loop.loop import Clock
from aligner.losses.sft import steerlm_loss
from aligner.types import TokenOutputs


def row(*response: int) -> SupervisedExample:
    return SupervisedExample(tokens=(1, *response), loss_mask=(False, *[True] * len(response)), source="x:1")


def group(proposals: tuple[float, ...] | None = (-0.7, -0.7)) -> ProposedGroup:
    """Responses of one and three tokens; the first one has three times the target."""
    return ProposedGroup(rows=(row(5), row(6, 7, 8)), targets=(math.log(0.3), math.log(0.1)), proposals=proposals)


def steerlm(policy, groups, reference=None, **settings) -> SteerLM2:
    return SteerLM2(SteerLM2Config(**settings), policy, reference, train=groups, validation=groups, pad_id=0, seed=1)


def test_weights_by_hand(fakes) -> None:
    """w = 3/4, 1/4. A policy of log-prob -1 a token: b = softmax(-1, -3) = 0.8808, 0.1192. Two tokens on average, two responses:
    coefficients 2 (w - b) / 2 = w - b; the loss is their sum with NLLs 1 and 3, over one group (two rows of 1/2)."""
    found = steerlm(fakes.FakePolicy([]), [group()]).weigh([group()])
    b = 1 / (1 + math.exp(-2))
    assert found.aim.tolist() == pytest.approx([0.75, 0.25]) and found.policy.tolist() == pytest.approx([b, 1 - b])
    assert found.batch.labels.flatten().tolist() == pytest.approx([0.75 - b, b - 0.75])
    assert found.kl.tolist() == pytest.approx([0.75 * math.log(0.75 / b) + 0.25 * math.log(0.25 / (1 - b))])
    assert found.effective.tolist() == pytest.approx([1 / (0.75**2 + 0.25**2)])
    loss = steerlm_loss(TokenOutputs(logprobs=-1.0 * found.batch.loss_mask), found.batch)
    assert loss.total.item() == pytest.approx((0.75 - b) * 1 + (b - 0.75) * 3, abs=1e-6) and loss.count.item() == 2


def test_a_proposal_that_is_the_start(fakes) -> None:
    """The reference says -2 a token: Q' = -2, -6; what the records say is not looked at, and need not be there."""
    made = steerlm(fakes.FakePolicy([]), [group(proposals=None)], fakes.FakePolicy([], level=-2.0), proposal=Proposal.start)
    found = made.weigh([group(proposals=None)])
    assert found.aim.tolist() == pytest.approx(torch.tensor([math.log(0.3) + 2, math.log(0.1) + 6]).softmax(0).tolist())
    assert found.policy.tolist() == pytest.approx(torch.tensor([1.0, 3.0]).softmax(0).tolist())
    with pytest.raises(DataError, match=r"x:1: the responses of 2 records have no 'log\(Q\(y\|a,x\)\)'; allowed: algorithm.proposal=start"):
        steerlm(fakes.FakePolicy([]), [group(proposals=None)])


def test_steps_bring_a_model_to_what_is_aimed_at(make_model) -> None:
    from aligner.models.training.optimizer import OptimizerConfig

    policy = make_model("policy", optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-3, warmup_steps=0, weight_decay=0.0))
    algorithm = steerlm(policy, [group()], batch_size=1)
    before = algorithm.validate()["validation/kl"]
    metrics = [algorithm.step(step, Clock()).metrics for step in range(1, 13)]
    assert metrics[0]["steerlm/kl"] == pytest.approx(before, rel=1e-5) and before > 0.02
    assert algorithm.validate()["validation/kl"] < before / 5
