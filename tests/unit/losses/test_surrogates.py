"""The surrogates and the correction by hand, on two responses of 2 and 3 tokens (ratios 1.5 0.5 | 1.5 0.5 1.1)."""

import math

import pytest
import torch
from torch import tensor

from aligner.losses.aggregation import Aggregation
from aligner.losses.correction import Correction, CorrectionConfig, Level, correction_weights
from aligner.losses.policy import Objective, policy_loss
from aligner.types import PolicyBatch, TokenOutputs

MASK = tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
RATIOS = tensor([1.5, 0.5, 1.5, 0.5, 1.1])
D = [math.log(ratio) for ratio in (1.5, 0.5, 1.5, 0.5, 1.1)]


def on_tokens(values):
    return torch.zeros(2, 5).masked_scatter(MASK, torch.as_tensor(values, dtype=torch.float32))


OLD = on_tokens([-1.0, -2.0, -0.5, -3.0, -1.5])


def loss(objective, advantages, aggregation=Aggregation.sequence_mean, rollout_logprobs=None, **options):
    """(result, the gradient of its total on the five tokens)."""
    logprobs = (OLD + on_tokens(RATIOS.log())).requires_grad_()
    batch = PolicyBatch(
        tokens=torch.zeros(2, 5, dtype=torch.int64),
        lengths=tensor([3, 4]),
        loss_mask=MASK,
        old_logprobs=OLD,
        advantages=on_tokens(advantages),
        rollout_logprobs=rollout_logprobs,
    )
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "aggregation": aggregation} | options
    result = policy_loss(TokenOutputs(logprobs=logprobs), batch, objective=objective, **settings)
    result.total.backward()
    return result, logprobs.grad[MASK].tolist()


BY_SEQUENCE = [1.0, 1.0, -1.0, -1.0, -1.0]
BY_TOKEN = [1.0, 1.0, -1.0, -1.0, 2.0]
S1, S2 = 0.75 ** (1 / 2), 0.825 ** (1 / 3)  # geometric means of the two responses' ratios


def test_gspo():
    result, gradient = loss(Objective.gspo, BY_SEQUENCE)
    assert result.total.item() == pytest.approx(-S1 + S2, abs=1e-6) and result.count.item() == 2
    # d s / d logprob of one of T tokens is s / T
    assert gradient == pytest.approx([-S1 / 2] * 2 + [S2 / 3] * 3, abs=1e-6)
    result, gradient = loss(Objective.gspo, BY_SEQUENCE, clip_eps_low=0.05)
    assert result.total.item() == pytest.approx(-S1 + 0.95, abs=1e-6)  # s2 < 0.95 and its advantage is negative: clipped
    assert gradient == pytest.approx([-S1 / 2] * 2 + [0.0] * 3, abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(3 / 5)


def test_gspo_token_has_the_sequences_ratio_and_the_tokens_gradient():
    result, gradient = loss(Objective.gspo_token, BY_TOKEN, Aggregation.token_mean)
    assert result.total.item() == pytest.approx(-2 * S1 + (1 + 1 - 2) * S2, abs=1e-6)
    assert gradient == pytest.approx([-S1, -S1, S2, S2, -2 * S2], abs=1e-6)


def test_cispo_drops_no_token():
    result, gradient = loss(Objective.cispo, BY_TOKEN, Aggregation.token_mean)
    weights = [1.28, 0.5, 1.28, 0.5, 1.1]
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, BY_TOKEN, strict=True)], abs=1e-6)
    assert result.total.item() == pytest.approx(sum(-w * a * d for w, a, d in zip(weights, BY_TOKEN, D, strict=True)), abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(2 / 5)


def test_gmpo():
    result, gradient = loss(Objective.gmpo, BY_SEQUENCE)
    first = math.exp((0.28 + D[1]) / 2)  # for a positive advantage large log-ratios are cut at 0.28
    second = math.exp((D[2] - 0.2 + D[4]) / 3)  # for a negative one small ones at -0.2
    assert result.total.item() == pytest.approx(-first + second, abs=1e-6)
    assert gradient == pytest.approx([0.0, -first / 2, second / 3, 0.0, second / 3], abs=1e-6)
    assert result.metrics["policy/clip_fraction"].value() == pytest.approx(2 / 5)


def test_sapo():
    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    result, _ = loss(Objective.sapo, BY_TOKEN, Aggregation.token_mean)
    expected = -gate(1.5, 1) - gate(0.5, 1) + gate(1.5, 1.05) + gate(0.5, 1.05) - 2 * gate(1.1, 1)
    assert result.total.item() == pytest.approx(expected, abs=1e-5)
    _, gradient = loss(Objective.sapo, BY_TOKEN, Aggregation.token_mean, tau_pos=2.0)
    p = 1 / (1 + math.exp(-2 * 0.5))
    assert gradient[0] == pytest.approx(-4 * p * (1 - p) * 1.5, abs=1e-6)  # 4 sigmoid' r


def test_reinforce_is_minus_advantage_times_logprob():
    _, gradient = loss(Objective.reinforce, BY_TOKEN, Aggregation.token_mean)
    assert gradient == pytest.approx([-a for a in BY_TOKEN])


@pytest.mark.parametrize("objective", Objective)
def test_on_the_policy_that_sampled_all_have_the_same_gradient(objective):
    """With one advantage per response, ratio 1 and the sequence mean they are all -A / T per token."""
    logprobs = OLD.clone().requires_grad_()
    batch = PolicyBatch(
        tokens=torch.zeros(2, 5, dtype=torch.int64),
        lengths=tensor([3, 4]),
        loss_mask=MASK,
        old_logprobs=None,
        advantages=on_tokens(BY_SEQUENCE),
    )
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "aggregation": Aggregation.sequence_mean}
    policy_loss(TokenOutputs(logprobs=logprobs), batch, objective=objective, **settings).total.backward()
    assert logprobs.grad[MASK].tolist() == pytest.approx([-1 / 2] * 2 + [1 / 3] * 3, abs=1e-6)


# Weights of the five tokens, trainer over engine: 3, 0.25 | 1.5, 1, 1.
ENGINE = OLD - on_tokens(tensor([3.0, 0.25, 1.5, 1.0, 1.0]).log())


@pytest.mark.parametrize(
    ("kind", "level", "factors", "corrected"),
    [
        (Correction.none, Level.token, [1, 1, 1, 1, 1], 0),
        (Correction.tis, Level.token, [2, 0.25, 1.5, 1, 1], 1),
        (Correction.icepop, Level.token, [0, 0, 1.5, 1, 1], 2),
        (Correction.mis, Level.token, [0, 0, 1, 1, 1], 2),
        (Correction.tis, Level.sequence, [0.75, 0.75, 1.5, 1.5, 1.5], 0),
        (Correction.icepop, Level.sequence_mean, [0.75**0.5] * 2 + [1.5 ** (1 / 3)] * 3, 0),
    ],
)
def test_correction_by_hand(kind, level, factors, corrected):
    got, metrics = correction_weights(OLD, ENGINE, MASK, CorrectionConfig(kind=kind, level=level))
    assert got[MASK].tolist() == pytest.approx(factors)
    assert metrics["rollout/corrected_fraction"].value() == pytest.approx(corrected / 5)
    if level is Level.token:
        assert metrics["rollout/importance_weight"].value() == pytest.approx(6.75 / 5)
        assert metrics["rollout/importance_weight_max"].value() == pytest.approx(3.0)


@pytest.mark.parametrize("kind", list(Correction))
def test_the_correction_has_no_gradient(kind):
    """It weighs what was sampled; through w = exp(old - engine) the policy would learn to move the weights instead."""
    old = OLD.clone().requires_grad_()
    factors, metrics = correction_weights(old, ENGINE, MASK, CorrectionConfig(kind=kind))
    assert not factors.requires_grad and not any(getattr(metric, "total", OLD).requires_grad for metric in metrics.values())


def test_the_correction_scales_the_surrogate_and_not_the_count():
    options = {"rollout_logprobs": ENGINE, "correction": CorrectionConfig(kind=Correction.icepop)}
    result, gradient = loss(Objective.reinforce, BY_TOKEN, Aggregation.token_mean, **options)
    assert gradient == pytest.approx([0, 0, 1.5, 1.0, -2.0], abs=1e-6) and result.count.item() == 5
    with pytest.raises(ValueError, match=r"PolicyBatch.rollout_logprobs is needed"):
        loss(Objective.ppo, BY_TOKEN, correction=CorrectionConfig(kind=Correction.tis))
