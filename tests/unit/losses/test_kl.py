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


LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([1.2, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(0)


def expected_gradient(loss_of):
    """Mean over the policy's own samples (all four tokens, weighed by their probability) of the gradient of a loss of its log-probs."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.detach().exp() * loss_of(logprobs)).sum().backward()
    return logits.grad


def exact_gradient(kl_of):
    logits = LOGITS.clone().requires_grad_()
    kl_of(logits.log_softmax(0)).backward()
    return logits.grad


def test_gradients_of_the_estimates_as_terms_of_the_loss():
    """k1 holds nothing, k2 has the gradient of KL(policy || reference), k3 that of the KL the other way round."""
    forward = exact_gradient(lambda lp: (lp.exp() * (lp - REF_LOGPROBS)).sum())
    backward = exact_gradient(lambda lp: (REF_LOGPROBS.exp() * (REF_LOGPROBS - lp)).sum())
    assert (forward - backward).abs().max() > 0.05
    found = {estimator: expected_gradient(lambda lp, e=estimator: kl_estimate(lp, REF_LOGPROBS, e)) for estimator in KLEstimator}
    for estimator, exact in ((KLEstimator.k1, torch.zeros(4)), (KLEstimator.k2, forward), (KLEstimator.k3, backward)):
        torch.testing.assert_close(found[estimator], exact.double(), rtol=0, atol=1e-12)
    signs = (LOGITS.log_softmax(0) - REF_LOGPROBS).sign()
    towards = expected_gradient(lambda lp: signs * lp)
    torch.testing.assert_close(found[KLEstimator.abs], towards, rtol=0, atol=1e-12)


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
