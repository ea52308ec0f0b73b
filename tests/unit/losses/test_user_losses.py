"""What functions of the user's return in place of an estimate or a loss: refused, with the setting as typed."""

import math

import pytest
import torch

from aligner.errors import UserCodeError
from aligner.losses.advantages import estimate
from aligner.losses.policy import Clip, surrogate
from aligner.losses.preference import LogRatios, UserPairLoss, pair_losses
from aligner.rewards.load import UserFunction

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.zeros(2), r"returned \(2,\), expected advantages of shape \(2, 3\)"),
        (None, "returned NoneType, expected advantages"),
        ([0.0], r"returned \[0.0\], expected advantages"),
        (torch.full((2, 3), math.nan), "returned advantages that are not finite"),
    ],
)
def test_an_estimator(result, said):
    own = UserFunction("algorithm.advantage_estimator=mine.py:f", lambda *_: result)
    with pytest.raises(UserCodeError, match=f"^algorithm.advantage_estimator=mine.py:f {said}"):
        estimate(own, torch.ones(2, 3), MASK, torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: x.exp(), r"returned Tensor|returned \(2, 3\), expected \(loss per token"),
        (lambda x: (x, x), r"expected \(loss per token, bool where it was clipped\)"),
        (lambda x: (x[0], MASK), r"returned \[\(3,\), \(2, 3\)\], expected"),
        (lambda x: (x * math.nan, MASK), "returned a loss that is not finite"),
        (lambda x: (x.detach(), MASK), "returned a loss without a gradient"),
    ],
)
def test_an_objective(made, said):
    own = UserFunction("algorithm.objective=mine.py:f", lambda ratios, *_: made(ratios))
    with pytest.raises(UserCodeError, match=f"^algorithm.objective=mine.py:f .*({said})"):
        surrogate(own, torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3), MASK, Clip(low=0.2, high=0.2))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: x.sum(), r"returned \(\), expected \(2,\): one loss per pair"),
        (lambda x: 1.0, "returned float, expected"),
        (lambda x: x / 0, "returned a loss that is not finite"),
        (lambda x: x.detach(), "returned a loss without a gradient"),
    ],
)
def test_a_pair_loss(made, said):
    own = UserPairLoss(value="mine.py:f", function=UserFunction("algorithm.loss=mine.py:f", lambda ratios: made(ratios.chosen)))
    ratios = LogRatios(chosen=torch.ones(2, requires_grad=True), rejected=torch.zeros(2), margins=torch.zeros(2), beta=0.1)
    with pytest.raises(UserCodeError, match=f"^algorithm.loss=mine.py:f {said}"):
        pair_losses(ratios, own)


def test_numbers_that_the_model_broke_are_not_the_functions_fault():
    own = UserPairLoss(value="mine.py:f", function=UserFunction("algorithm.loss=mine.py:f", lambda ratios: ratios.chosen))
    broken = torch.full((2,), math.nan, requires_grad=True)
    ratios = LogRatios(chosen=broken, rejected=torch.zeros(2), margins=torch.zeros(2), beta=0.1)
    assert pair_losses(ratios, own).isnan().all()
