"""Regression, process rewards and SteerLM 2 against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from aligner.losses.reward import MISSING_LABEL, regression_loss, step_loss
from aligner.losses.sft import importance_weights, response_coefficients, steerlm_loss
from aligner.telemetry.metrics import values
from aligner.types import LabeledBatch, TokenOutputs

M = MISSING_LABEL
SCORES = tensor([[1.0, 2.0, 0.0], [3.0, -1.0, 5.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
LABELS = tensor([[2.0, M, 0.5], [3.0, 1.0, M], [0.0, 0.0, 0.0]])  # the last row is filler
ROWS = LabeledBatch(
    tokens=torch.zeros(3, 2, dtype=torch.int64),
    lengths=tensor([2, 2, 1]),
    loss_mask=tensor([[False, True], [False, True], [False, False]]),
    labels=LABELS,
)


def test_regression_by_hand():
    """Errors -1, -0.5 | 0, -2; the labels that are missing, and filler, count nothing."""
    scores = SCORES.clone().requires_grad_()
    result = regression_loss(TokenOutputs(scores=scores), ROWS, attributes=["help", "correct", "coherent"])
    result.total.backward()
    assert result.total.item() == 1 + 0.25 + 0 + 4 and result.count.item() == 4
    torch.testing.assert_close(scores.grad, tensor([[-2, 0, -1], [0, -4, 0], [0, 0, 0]], dtype=torch.float64))
    numbers = values(result.metrics)
    assert numbers["reward/loss"] == 5.25 / 4 and numbers["reward/absolute_error"] == 3.5 / 4
    assert (numbers["reward/score_mean"], numbers["reward/label_mean"]) == (3 / 4, 6.5 / 4)
    assert [numbers[f"reward/mse_{name}"] for name in ("help", "correct", "coherent")] == [0.5, 4.0, 0.25]


def test_an_attribute_without_any_label_has_no_mean_and_no_gradient():
    result = regression_loss(TokenOutputs(scores=SCORES), replace(ROWS, labels=torch.full((3, 3), M)), attributes=["a", "b", "c"])
    assert result.total.item() == 0 and result.count.item() == 0 and math.isnan(values(result.metrics)["reward/mse_a"])


@pytest.mark.parametrize(
    ("scores", "batch", "attributes", "named"),
    [
        (None, ROWS, (), r"TokenOutputs\.scores is needed"),
        (SCORES, replace(ROWS, labels=None), (), r"LabeledBatch\.labels is needed"),
        (SCORES[:, :1], ROWS, (), r"\(3, 1\), expected \(3, 3\)"),
        (SCORES, ROWS, ("help",), "there are 1 attributes, expected 3"),
    ],
)
def test_regression_refuses(scores, batch, attributes, named):
    with pytest.raises(ValueError, match=named):
        regression_loss(TokenOutputs(scores=scores), batch, attributes=attributes)


def test_step_loss_by_hand():
    """Steps end where the mask is True: scores 1 (good), -2 (bad), 0.5 (half of its continuations right)."""
    mask = tensor([[False, True, False, True], [False, False, True, False]])
    scores = tensor([[99, 1.0, float("nan"), -2.0], [99, 99, 0.5, 99]], dtype=torch.float64, requires_grad=True)
    labels = tensor([[-7, 1.0, -7, 0.0], [-7, -7, 0.5, float("nan")]], dtype=torch.float64)
    result = step_loss(scores, labels, mask)
    result.total.backward()
    expected = 0.3132616875 + 0.1269280110 + (0.4740769842 + 0.9740769842) / 2
    assert result.total.item() == pytest.approx(expected, abs=1e-9) and result.count.item() == 3
    # sigma(score) - label
    torch.testing.assert_close(scores.grad, tensor([[0, -0.2689414214, 0, 0.1192029220], [0, 0, 0.1224593312, 0]], dtype=torch.float64))
    numbers = values(result.metrics)
    assert numbers["reward/accuracy"] == pytest.approx(2 / 3)  # a half is not above a half, a score of 0.5 is above 0
    assert numbers["reward/score_mean"] == pytest.approx(-0.5 / 3)
    with pytest.raises(ValueError, match=r"labels \(2, 3\)"):
        step_loss(scores, labels[:, 1:], mask)


# Two groups of two. target - proposal: log 3, 0 | 0, 0, so w = 3/4, 1/4 | 1/2, 1/2; policy - proposal: 0, 0 | log 4, 0.
AIM = tensor([math.log(3) - 5, -7.0, -1.0, -2.0], dtype=torch.float64)
PROPOSAL = tensor([-5.0, -7.0, -1.0, -2.0], dtype=torch.float64)
POLICY = tensor([-5.0, -7.0, -1.0 + math.log(4), -2.0], dtype=torch.float64)
LENGTHS = tensor([1, 3, 2, 2])


def test_steerlm_weights_by_hand():
    aim, policy = (importance_weights(x, PROPOSAL, group_size=2) for x in (AIM, POLICY))
    torch.testing.assert_close(aim, tensor([0.75, 0.25, 0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(policy, tensor([0.5, 0.5, 0.8, 0.2], dtype=torch.float64))
    # 2 (w - b) / 2 tokens
    expected = tensor([0.25, -0.25, -0.3, 0.3])
    torch.testing.assert_close(response_coefficients(aim, policy, LENGTHS, group_size=2), expected)
    # log-probs far apart, as sums over long responses are
    far = importance_weights(tensor([-4000.0, -5000.0]), tensor([-4500.0, -5000.0]), group_size=2)
    assert far.tolist() == [1.0, 0.0]


def steerlm_batch(coefficients):
    mask = torch.arange(4) < (LENGTHS[:, None] + 1)
    mask[:, 0] = False
    return LabeledBatch(tokens=torch.zeros(4, 4, dtype=torch.int64), lengths=LENGTHS + 1, loss_mask=mask, labels=coefficients[:, None])


def test_steerlm_loss_by_hand():
    """Coefficients 1, -1, 0.5, -0.5 of negative log-likelihoods 1, 3, 4, 2: -2 and 1."""
    batch = steerlm_batch(tensor([1.0, -1.0, 0.5, -0.5]))
    logprobs = (tensor([[-1.0], [-1.0], [-2.0], [-1.0]], dtype=torch.float64) * torch.ones(4, 4)).requires_grad_()
    result = steerlm_loss(TokenOutputs(logprobs=logprobs), batch)
    result.total.backward()
    assert result.total.item() == -1.0 and result.count.item() == 4
    torch.testing.assert_close(logprobs.grad, -batch.labels.double() * batch.loss_mask)
    numbers = values(result.metrics)
    assert (numbers["steerlm/loss"], numbers["steerlm/nll"], numbers["steerlm/distance"]) == (-0.25, 10 / 8, 0.75)


def test_steerlm_gradient_is_that_of_the_kl_to_the_aim():
    """Of KL(w || b) with b made of the policy's own log-probs, over the mean tokens of each group and averaged over groups."""
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(4, 4, generator=generator, dtype=torch.float64)
    aim = importance_weights(AIM, PROPOSAL, group_size=2)
    mask = steerlm_batch(torch.zeros(4)).loss_mask

    direct = logprobs.clone().requires_grad_()
    policy = torch.log_softmax(((direct * mask).sum(dim=1) - PROPOSAL).view(-1, 2), dim=1).flatten()
    per_group = (aim * (aim.log() - policy)).view(-1, 2).sum(dim=1) / LENGTHS.view(-1, 2).double().mean(dim=1)
    per_group.mean().backward()

    ours = logprobs.clone().requires_grad_()
    now = importance_weights((logprobs * mask).sum(dim=1), PROPOSAL, group_size=2)
    batch = steerlm_batch(response_coefficients(aim, now, LENGTHS, group_size=2))
    result = steerlm_loss(TokenOutputs(logprobs=ours), batch)
    (result.total / result.count).backward()
    torch.testing.assert_close(ours.grad, direct.grad, rtol=1e-6, atol=1e-8)


def test_steerlm_refuses():
    with pytest.raises(ValueError, match="group_size is 3 for 4 responses"):
        importance_weights(AIM, PROPOSAL, group_size=3)
    with pytest.raises(ValueError, match=r"target is \(4,\) and proposal \(2,\)"):
        importance_weights(AIM, PROPOSAL[:2], group_size=2)
    with pytest.raises(ValueError, match=r"labels is \(3, 3\), expected \(3, 1\)"):
        steerlm_loss(TokenOutputs(logprobs=torch.zeros(3, 2)), ROWS)
