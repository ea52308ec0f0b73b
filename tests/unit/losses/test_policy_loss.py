import math

import pytest
import torch
from torch import tensor

from aligner.losses.correction import Correction, CorrectionConfig
from aligner.losses.kl import KLEstimator
from aligner.losses.policy import Aggregation, Objective, policy_loss
from aligner.types import PolicyBatch, TokenOutputs

# Two responses of 2 and 3 tokens behind a prompt token, padded to 5; ratios and advantages of the five response tokens:
#   r    1.5    0.5 |  1.5   0.5   1.1
#   A    1      1   | -1    -1     2
# with clip 0.2 / 0.28:
#   loss -1.28 -0.5 |  1.5   0.8  -2.2      sum -1.68; clipped: first and fourth
MASK = tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
RATIOS = tensor([1.5, 0.5, 1.5, 0.5, 1.1])
D = RATIOS.log().tolist()
BY_TOKEN, BY_SEQUENCE = (1.0, 1.0, -1.0, -1.0, 2.0), (1.0, 1.0, -1.0, -1.0, -1.0)
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def on_tokens(values):
    return torch.zeros(2, 5).masked_scatter(MASK, torch.as_tensor(values, dtype=torch.float32))


OLD = on_tokens([-1.0, -2.0, -0.5, -3.0, -1.5])


def batch(advantages=BY_TOKEN, old_logprobs=OLD, **optional):
    return PolicyBatch(
        tokens=torch.zeros(2, 5, dtype=torch.int64),
        lengths=tensor([3, 4]),
        loss_mask=MASK,
        old_logprobs=old_logprobs,
        advantages=on_tokens(advantages),
        **optional,
    )


def outputs(**optional):
    return TokenOutputs(logprobs=(OLD + on_tokens(RATIOS.log())).requires_grad_(), **optional)


def loss(outs=None, made_of=None, aggregation=Aggregation.token_mean, **options):
    return policy_loss(outs or outputs(), made_of or batch(), aggregation=aggregation, **CLIP | options)


def surrogate(objective, advantages, aggregation=Aggregation.sequence_mean, rollout_logprobs=None, **options):
    """(result, the gradient of its total on the five tokens)."""
    outs = outputs()
    result = loss(outs, batch(advantages, rollout_logprobs=rollout_logprobs), aggregation, objective=objective, **options)
    result.total.backward()
    return result, outs.logprobs.grad[MASK].tolist()


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
    assert result.metrics["policy/loss"].value() == pytest.approx(total / count, abs=1e-6)


def test_metrics_by_hand():
    metrics = loss().metrics
    assert metrics["policy/clip_fraction"].value() == pytest.approx(0.4)
    assert metrics["policy/ratio_mean"].value() == pytest.approx(1.02)
    # r - 1 - ln r: 2 * 0.09453489 + 2 * 0.19314718 + 0.00468982
    assert metrics["policy/approx_kl"].value() == pytest.approx(0.58005396 / 5, abs=1e-6)
    assert set(metrics) == {"policy/loss", "policy/clip_fraction", "policy/approx_kl", "policy/ratio_mean"}


def test_entropy_bonus():
    result = loss(outputs(entropy=on_tokens([1.0, 2.0, 3.0, 4.0, 5.0])), entropy_coef=0.01)
    assert result.total.item() == pytest.approx(-1.68 - 0.15, abs=1e-6)
    assert result.metrics["policy/entropy"].value() == pytest.approx(3.0)


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
    assert result.metrics["policy/ref_kl"].value() == pytest.approx(kl_sum / 5, abs=1e-6)


def test_reference_and_entropy_without_coefficients_are_only_reported():
    result = loss(outputs(entropy=on_tokens([1.0] * 5)), batch(ref_logprobs=OLD))
    assert result.total.item() == pytest.approx(-1.68, abs=1e-6)
    assert {"policy/ref_kl", "policy/entropy"} <= set(result.metrics)


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
    assert result.metrics["policy/ratio_mean"].value() > 1e7


S1, S2 = 0.75 ** (1 / 2), 0.825 ** (1 / 3)  # geometric means of the two responses' ratios


def test_gspo():
    result, gradient = surrogate(Objective.gspo, BY_SEQUENCE)
    assert result.total.item() == pytest.approx(-S1 + S2, abs=1e-6) and result.count.item() == 2
    # d s / d logprob of one of T tokens is s / T
    assert gradient == pytest.approx([-S1 / 2] * 2 + [S2 / 3] * 3, abs=1e-6)
    result, gradient = surrogate(Objective.gspo, BY_SEQUENCE, clip_eps_low=0.05)
    assert result.total.item() == pytest.approx(-S1 + 0.95, abs=1e-6)  # s2 < 0.95 and its advantage is negative: clipped
    assert gradient == pytest.approx([-S1 / 2] * 2 + [0.0] * 3, abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(3 / 5)


def test_gspo_token_has_the_sequences_ratio_and_the_tokens_gradient():
    result, gradient = surrogate(Objective.gspo_token, BY_TOKEN, Aggregation.token_mean)
    assert result.total.item() == pytest.approx(-2 * S1 + (1 + 1 - 2) * S2, abs=1e-6)
    assert gradient == pytest.approx([-S1, -S1, S2, S2, -2 * S2], abs=1e-6)


def test_cispo_drops_no_token():
    result, gradient = surrogate(Objective.cispo, BY_TOKEN, Aggregation.token_mean)
    weights = [1.28, 0.5, 1.28, 0.5, 1.1]
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, BY_TOKEN, strict=True)], abs=1e-6)
    assert result.total.item() == pytest.approx(sum(-w * a * d for w, a, d in zip(weights, BY_TOKEN, D, strict=True)), abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(2 / 5)


def test_gmpo():
    result, gradient = surrogate(Objective.gmpo, BY_SEQUENCE)
    first = math.exp((0.28 + D[1]) / 2)  # for a positive advantage large log-ratios are cut at 0.28
    second = math.exp((D[2] - 0.2 + D[4]) / 3)  # for a negative one small ones at -0.2
    assert result.total.item() == pytest.approx(-first + second, abs=1e-6)
    assert gradient == pytest.approx([0.0, -first / 2, second / 3, 0.0, second / 3], abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(2 / 5)


def test_sapo():
    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    result, _ = surrogate(Objective.sapo, BY_TOKEN, Aggregation.token_mean)
    expected = -gate(1.5, 1) - gate(0.5, 1) + gate(1.5, 1.05) + gate(0.5, 1.05) - 2 * gate(1.1, 1)
    assert result.total.item() == pytest.approx(expected, abs=1e-5)
    _, gradient = surrogate(Objective.sapo, BY_TOKEN, Aggregation.token_mean, tau_pos=2.0)
    p = 1 / (1 + math.exp(-2 * 0.5))
    assert gradient[0] == pytest.approx(-4 * p * (1 - p) * 1.5, abs=1e-6)  # 4 sigmoid' r


def test_reinforce_is_minus_advantage_times_logprob():
    _, gradient = surrogate(Objective.reinforce, BY_TOKEN, Aggregation.token_mean)
    assert gradient == pytest.approx([-a for a in BY_TOKEN])


@pytest.mark.parametrize("objective", Objective)
def test_on_the_policy_that_sampled_all_have_the_same_gradient(objective):
    """With one advantage per response, ratio 1 and the sequence mean they are all -A / T per token."""
    logprobs = OLD.clone().requires_grad_()
    made = batch(BY_SEQUENCE, old_logprobs=None)
    loss(TokenOutputs(logprobs=logprobs), made, Aggregation.sequence_mean, objective=objective).total.backward()
    assert logprobs.grad[MASK].tolist() == pytest.approx([-1 / 2] * 2 + [1 / 3] * 3, abs=1e-6)


def test_the_correction_scales_the_surrogate_and_not_the_count():
    engine = OLD - on_tokens(tensor([3.0, 0.25, 1.5, 1.0, 1.0]).log())
    options = {"rollout_logprobs": engine, "correction": CorrectionConfig(kind=Correction.icepop)}
    result, gradient = surrogate(Objective.reinforce, BY_TOKEN, Aggregation.token_mean, **options)
    assert gradient == pytest.approx([0, 0, 1.5, 1.0, -2.0], abs=1e-6) and result.count.item() == 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"outs": TokenOutputs()}, r"TokenOutputs\.logprobs"),
        ({"entropy_coef": 0.1}, r"TokenOutputs\.entropy"),
        ({"kl_coef": 0.1}, r"PolicyBatch\.ref_logprobs"),
        ({"correction": CorrectionConfig(kind=Correction.tis)}, r"PolicyBatch\.rollout_logprobs"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"aggregation": Aggregation.sequence_sum_constant}, "aggregation_constant is None"),
    ],
)
def test_what_is_missing_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        loss(**arguments)
