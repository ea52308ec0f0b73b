import math

import pytest
import torch
from torch import tensor

from aligner.losses.kl import KLEstimator
from aligner.losses.policy import Aggregation, policy_loss
from aligner.types import PolicyBatch, TokenOutputs

# Two responses of 2 and 3 tokens behind a prompt token, padded to 5; ratios and advantages of the five response tokens:
#   r    1.5    0.5 |  1.5   0.5   1.1
#   A    1      1   | -1    -1     2
# with clip 0.2 / 0.28:
#   loss -1.28 -0.5 |  1.5   0.8  -2.2      sum -1.68; clipped: first and fourth
MASK = tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
RATIOS = tensor([1.5, 0.5, 1.5, 0.5, 1.1])
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def on_tokens(values):
    return torch.zeros(2, 5).masked_scatter(MASK, torch.as_tensor(values, dtype=torch.float32))


OLD = on_tokens([-1.0, -2.0, -0.5, -3.0, -1.5])


def batch(**optional):
    return PolicyBatch(
        tokens=torch.zeros(2, 5, dtype=torch.int64),
        lengths=tensor([3, 4]),
        loss_mask=MASK,
        old_logprobs=OLD,
        advantages=on_tokens([1.0, 1.0, -1.0, -1.0, 2.0]),
        **optional,
    )


def outputs(**optional):
    return TokenOutputs(logprobs=(OLD + on_tokens(RATIOS.log())).requires_grad_(), **optional)


def loss(outs=None, made_of=None, aggregation=Aggregation.token_mean, **options):
    return policy_loss(outs or outputs(), made_of or batch(), aggregation=aggregation, **CLIP | options)


def number(metric):
    return metric.value()


@pytest.mark.parametrize(
    ("options", "total", "count"),
    [
        ({"aggregation": Aggregation.token_mean}, -1.68, 5),
        ({"aggregation": Aggregation.sequence_mean}, -1.78 / 2 + 0.1 / 3, 2),
        ({"aggregation": Aggregation.sequence_sum_constant, "aggregation_constant": 10}, -0.168, 2),
        ({"dual_clip": 1.2}, -1.98, 5),  # third token: 1.2 in place of 1.5
        ({"dual_clip": 3.0}, -1.68, 5),
        ({"clip_eps_high": 0.6}, -1.9, 5),  # first token: -1.5 in place of -1.28
    ],
)
def test_loss_by_hand(options, total, count):
    result = loss(**options)
    assert result.total.item() == pytest.approx(total, abs=1e-6)
    assert result.count.item() == count and result.count.dtype == torch.int64
    assert number(result.metrics["policy/loss"]) == pytest.approx(total / count, abs=1e-6)


def test_metrics_by_hand():
    metrics = loss().metrics
    assert number(metrics["policy/clip_fraction"]) == pytest.approx(0.4)
    assert number(metrics["policy/ratio_mean"]) == pytest.approx(1.02)
    # r - 1 - ln r: 2 * 0.09453489 + 2 * 0.19314718 + 0.00468982
    assert number(metrics["policy/approx_kl"]) == pytest.approx(0.58005396 / 5, abs=1e-6)
    assert set(metrics) == {"policy/loss", "policy/clip_fraction", "policy/approx_kl", "policy/ratio_mean"}


def test_entropy_bonus():
    result = loss(outputs(entropy=on_tokens([1.0, 2.0, 3.0, 4.0, 5.0])), entropy_coef=0.01)
    assert result.total.item() == pytest.approx(-1.68 - 0.15, abs=1e-6)
    assert number(result.metrics["policy/entropy"]) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("estimator", "kl_sum"),
    [
        (KLEstimator.k1, -0.48005396),  # ln(1.5 * 0.5 * 1.5 * 0.5 * 1.1)
        (KLEstimator.k3, 0.76237029),  # 1/r - 1 + ln r: 2 * 0.07213178 + 2 * 0.30685282 + 0.00440109
    ],
)
def test_kl_term(estimator, kl_sum):
    result = loss(made_of=batch(ref_logprobs=OLD), kl_coef=0.1, kl_estimator=estimator)
    assert result.total.item() == pytest.approx(-1.68 + 0.1 * kl_sum, abs=1e-6)
    assert number(result.metrics["policy/ref_kl"]) == pytest.approx(kl_sum / 5, abs=1e-6)


def test_reference_and_entropy_without_coefficients_are_only_reported():
    result = loss(outputs(entropy=on_tokens([1.0] * 5)), batch(ref_logprobs=OLD))
    assert result.total.item() == pytest.approx(-1.68, abs=1e-6)
    assert {"policy/ref_kl", "policy/entropy"} <= set(result.metrics)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_against_a_loop_over_tokens(aggregation):
    """Every option at once, on random rows, against the formulas written token by token."""
    generator = torch.Generator().manual_seed(3)
    old, ref, new, adv, entropy = (torch.randn(6, 8, generator=generator) for _ in range(5))
    mask = torch.rand(6, 8, generator=generator) < 0.6
    mask[2] = False
    lengths = torch.full((6,), 8)
    made = PolicyBatch(
        tokens=torch.zeros(6, 8, dtype=torch.int64), lengths=lengths, loss_mask=mask, old_logprobs=old, advantages=adv, ref_logprobs=ref
    )
    result = policy_loss(
        TokenOutputs(logprobs=new, entropy=entropy),
        made,
        aggregation=aggregation,
        aggregation_constant=16,
        dual_clip=2.0,
        entropy_coef=0.05,
        kl_coef=0.1,
        **CLIP,
    )
    sequences = []
    for b in range(6):
        losses = []
        for t in mask[b].nonzero().flatten().tolist():
            r, a = math.exp(new[b, t].item() - old[b, t].item()), adv[b, t].item()
            objective = min(r * a, min(max(r, 0.8), 1.28) * a)
            objective = max(objective, 2.0 * a) if a < 0 else objective
            d = new[b, t].item() - ref[b, t].item()
            losses.append(-objective - 0.05 * entropy[b, t].item() + 0.1 * (math.exp(-d) + d - 1))
        sequences.append(losses)
    tokens = [x for losses in sequences for x in losses]
    expected = {
        Aggregation.token_mean: sum(tokens) / len(tokens),
        Aggregation.sequence_mean: sum(sum(x) / len(x) for x in sequences if x) / 5,
        Aggregation.sequence_sum_constant: sum(tokens) / 16 / 5,
    }[aggregation]
    assert (result.total / result.count).item() == pytest.approx(expected, rel=1e-5)


def test_gradcheck():
    generator = torch.Generator().manual_seed(4)
    logprobs = (OLD.double() + 0.3 * torch.randn(2, 5, generator=generator)).double().requires_grad_()
    entropy = torch.rand(2, 5, generator=generator).double().requires_grad_()
    made = batch(ref_logprobs=OLD - 0.5)

    def total(lp, h):
        return loss(TokenOutputs(logprobs=lp, entropy=h), made, Aggregation.sequence_mean, kl_coef=0.3, entropy_coef=0.2).total

    assert torch.autograd.gradcheck(total, (logprobs, entropy))


def test_an_overflowing_ratio_leaves_loss_and_gradient_finite():
    outs = TokenOutputs(logprobs=(OLD + on_tokens([200.0, 0.0, 0.0, 0.0, 0.0])).requires_grad_())
    result = loss(outs)
    result.total.backward()
    assert result.total.isfinite() and outs.logprobs.grad.isfinite().all()
    assert outs.logprobs.grad[0, 1].item() == 0.0
    assert number(result.metrics["policy/ratio_mean"]) > 1e7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"outs": TokenOutputs()}, r"TokenOutputs\.logprobs"),
        ({"entropy_coef": 0.1}, r"TokenOutputs\.entropy"),
        ({"kl_coef": 0.1}, r"PolicyBatch\.ref_logprobs"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"aggregation": Aggregation.sequence_sum_constant}, "aggregation_constant is None"),
    ],
)
def test_what_is_missing_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        loss(**arguments)
