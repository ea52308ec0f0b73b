import math

import pytest
import torch

from aligner.losses.kl import KLEstimator, adapt_kl_coef, kl_estimate

LOGPROBS = torch.tensor([-1.0, -2.0])
REF = torch.tensor([-1.5, -1.0])  # d = 0.5, -1


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (KLEstimator.k1, [0.5, -1.0]),
        (KLEstimator.abs, [0.5, 1.0]),
        (KLEstimator.k2, [0.125, 0.5]),
        (KLEstimator.k3, [0.10653066, 0.71828183]),  # exp(-0.5) - 0.5, exp(1) - 2
    ],
)
def test_estimators(estimator, expected):
    torch.testing.assert_close(kl_estimate(LOGPROBS, REF, estimator), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3])
def test_unbiased_for_kl_of_policy_from_reference(estimator):
    policy, ref = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.25, 0.75]).double()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # KL(policy || ref); the other direction is 0.1308
    estimate = (policy * kl_estimate(policy.log(), ref.log(), estimator)).sum().item()
    assert estimate == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", [KLEstimator.abs, KLEstimator.k2, KLEstimator.k3])  # k1 as a loss pushes every log-prob down
def test_minimising_the_estimate_moves_the_policy_to_the_reference(estimator):
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_estimate(logprobs, REF, estimator).sum().backward()
    assert (logprobs.grad.sign() == torch.tensor([1.0, -1.0])).all()  # down where above the reference, up where below


def test_k1_is_positive_where_the_policy_is_above_the_reference():
    assert kl_estimate(torch.tensor(-0.1), torch.tensor(-3.0), KLEstimator.k1).item() == pytest.approx(2.9)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_gradients(estimator):
    logprobs = LOGPROBS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, REF.double(), estimator), (logprobs,))


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k4.*'k1', 'abs', 'k2', 'k3'"):
        kl_estimate(LOGPROBS, REF, "k4")


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.100512),  # 0.1 * (1 + 0.1 * 512 / 10000)
        (12.0, 0.101024),  # clipped at +0.2
        (3.0, 0.098976),  # clipped at -0.2
    ],
)
def test_adaptive_coefficient(observed, expected):
    assert adapt_kl_coef(0.1, observed, target=6.0, horizon=10000.0, num_samples=512) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1.0), (1.0, 0.0)])
def test_adaptive_coefficient_refuses(target, horizon):
    with pytest.raises(ValueError, match="target > 0 and horizon > 0"):
        adapt_kl_coef(0.1, 1.0, target=target, horizon=horizon, num_samples=1)
