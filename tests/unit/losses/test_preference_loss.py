"""The DPO family against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from aligner.losses.preference import DPOVariant, dpo_loss
from aligner.telemetry.metrics import values
from aligner.types import PreferenceBatch, TokenOutputs

# Three pairs, rows chosen, rejected, chosen, ...; l - ref summed over the response (number of tokens):
#   chosen     0.5 (3)   -1.625 (2)   2.5 (3)
#   rejected  -1.25 (4)   1.75 (3)   -0.5 (1)
#   D          1.75      -3.375       3
MASK = tensor(
    [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0]]
).bool()
POLICY = [-0.5, -1.5, -0.25, -2, -0.75, -1.25, -0.5, -3, -0.125, -0.25, -0.5, -1, -1.75, -0.5, -2.5, -0.75]
REFERENCE = [-1, -1, -0.75, -1.5, -1, -0.5, -0.25, -1, -0.5, -1.25, -0.75, -1.5, -2.25, -1.5, -3.5, -0.25]
D = (1.75, -3.375, 3.0)


def on_tokens(numbers):
    return torch.zeros(6, 6, dtype=torch.float64).masked_scatter(MASK, tensor(numbers, dtype=torch.float64))


LOGPROBS = on_tokens(POLICY)
BATCH = PreferenceBatch(
    tokens=torch.zeros(6, 6, dtype=torch.int64),
    lengths=torch.full((6,), 6),
    loss_mask=MASK,
    margins=torch.zeros(3),
    ref_logprobs=on_tokens(REFERENCE).float(),
)


def softplus(x):
    return math.log1p(math.exp(x))  # -log sigma(-x)


def run(batch=BATCH, **settings):
    """(the loss's output, its gradient in the log-probs)."""
    logprobs = LOGPROBS.clone().requires_grad_()
    result = dpo_loss(TokenOutputs(logprobs=logprobs), batch, **settings)
    result.total.backward()
    return result, logprobs.grad


def test_dpo_by_hand():
    result, gradient = run(beta=0.5)
    expected = sum(softplus(-0.5 * d) for d in D)
    assert result.total.item() == pytest.approx(expected, abs=1e-6) and result.count.item() == 3
    # d/dl of a chosen token: -beta sigma(-beta D); of a rejected one the opposite; nothing elsewhere
    pull = [0.5 / (1 + math.exp(0.5 * d)) for d in D]
    rows = tensor([sign * p for p in pull for sign in (-1, 1)], dtype=torch.float64)
    torch.testing.assert_close(gradient, rows[:, None] * MASK)
    numbers = values(result.metrics)
    assert numbers["preference/loss"] == pytest.approx(expected / 3, abs=1e-6)
    assert numbers["preference/accuracy"] == pytest.approx(2 / 3)
    assert numbers["preference/chosen_reward"] == pytest.approx(0.5 * (0.5 - 1.625 + 2.5) / 3)
    assert numbers["preference/rejected_reward"] == pytest.approx(0.0)
    assert numbers["preference/margin"] == pytest.approx(0.5 * sum(D) / 3)
    assert numbers["preference/chosen_logprob"] == pytest.approx((-2.25 - 3.125 - 4.75) / 8)
    assert numbers["preference/rejected_logprob"] == pytest.approx((-4.5 - 1.75 - 0.75) / 8)


def test_hinge_and_ipo_by_hand():
    assert run(beta=0.5, variant=DPOVariant.hinge)[0].total.item() == pytest.approx((1 - 0.875) + (1 + 1.6875) + 0)
    means = (0.5 / 3 + 1.25 / 4, -1.625 / 2 - 1.75 / 3, 2.5 / 3 + 0.5)  # averaged over each response's own tokens
    assert run(beta=0.5, variant=DPOVariant.ipo)[0].total.item() == pytest.approx(sum((d - 1) ** 2 for d in means), rel=1e-6)


def test_the_supervised_term_is_a_mean_per_response_then_over_pairs():
    plain, plain_gradient = run(beta=0.5)
    result, gradient = run(beta=0.5, sft_coef=0.2)
    per_response = 2.25 / 3 + 3.125 / 2 + 4.75 / 3
    assert (result.total - plain.total).item() == pytest.approx(0.2 * per_response, abs=1e-6)
    assert values(result.metrics)["preference/sft_loss"] == pytest.approx(per_response / 3)
    weights = tensor([-0.2 / 3, 0, -0.2 / 2, 0, -0.2 / 3, 0], dtype=torch.float64)[:, None] * MASK
    torch.testing.assert_close(gradient - plain_gradient, weights)


def test_the_first_step_has_the_loss_of_indifference():
    """The policy is the reference: D = 0 whatever the responses."""
    same = replace(BATCH, ref_logprobs=LOGPROBS.float())
    result, gradient = run(same, beta=0.3)
    assert result.total.item() == pytest.approx(3 * math.log(2))
    assert values(result.metrics)["preference/accuracy"] == 0.0  # a tie is not accurate
    torch.testing.assert_close(gradient, tensor([-0.15, 0.15] * 3, dtype=torch.float64)[:, None] * MASK)


def test_filler_pairs_count_nothing():
    mask = MASK.clone()
    mask[2:4] = False
    result, gradient = run(replace(BATCH, loss_mask=mask), beta=0.5, sft_coef=1.0)
    assert result.count.item() == 2 and not gradient[2:4].any()
    expected = softplus(-0.5 * D[0]) + softplus(-0.5 * D[2]) + 2.25 / 3 + 4.75 / 3
    assert result.total.item() == pytest.approx(expected, abs=1e-6)
    assert values(result.metrics)["preference/accuracy"] == 1.0


@pytest.mark.parametrize("variant", list(DPOVariant))
def test_gradcheck(variant):
    logprobs, batch = LOGPROBS.clone().requires_grad_(), replace(BATCH, margins=tensor([0.5, -1.0, 2.0]))
    settings = {"beta": 0.4, "variant": variant, "sft_coef": 0.3, "label_smoothing": 0.1 * variant.takes_smoothing, "dpop_coef": 2.0}
    assert torch.autograd.gradcheck(lambda x: dpo_loss(TokenOutputs(logprobs=x), batch, **settings).total, (logprobs,), fast_mode=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beta": 0.0}, "beta is 0.0"),
        ({"beta": 0.1, "label_smoothing": 0.5}, "label_smoothing is 0.5, expected a number from 0 to below 0.5"),
        ({"beta": 0.1, "label_smoothing": 0.1, "variant": DPOVariant.ipo}, "label_smoothing is 0.1, expected 0 for variant ipo"),
    ],
)
def test_bad_settings_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        dpo_loss(TokenOutputs(logprobs=LOGPROBS), BATCH, **settings)


def test_missing_and_misshapen_log_probs_are_refused():
    with pytest.raises(ValueError, match=r"TokenOutputs\.logprobs is needed"):
        dpo_loss(TokenOutputs(), BATCH, beta=0.1)
    with pytest.raises(ValueError, match=r"PreferenceBatch\.ref_logprobs is needed"):
        dpo_loss(TokenOutputs(logprobs=LOGPROBS), replace(BATCH, ref_logprobs=None), beta=0.1)
    with pytest.raises(ValueError, match=r"TokenOutputs\.logprobs is \(6, 5\), expected \(6, 6\)"):
        dpo_loss(TokenOutputs(logprobs=LOGPROBS[:, 1:]), BATCH, beta=0.1)
