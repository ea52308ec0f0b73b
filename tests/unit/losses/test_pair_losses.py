"""The preference losses beyond DPO, against numbers worked out by hand: their values, gradients, and what enters them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from aligner.losses.preference import DPOVariant, LogRatios, dpo_loss, log_odds, pair_losses
from aligner.types import PreferenceBatch, TokenOutputs

# beta 0.5: two pairs with c = 2, r = -1 (beta D = 1.5) and c = -1, r = 1 (beta D = -1); g = 2 and 1.
GIVEN = {"margins": tensor([1.0, 0.5], dtype=torch.float64), "beta": 0.5, "eta": 2.0}
CHOSEN, REJECTED = tensor([2.0, -1.0], dtype=torch.float64), tensor([-1.0, 1.0], dtype=torch.float64)
EXPECTED = [
    ("robust", {"smoothing": 0.1}, 0.0139132780, 1.4382616875),  # 0.1 / 0.8 * 1.5 less, 0.125 more
    ("cpo", {}, 0.2014132780, 1.3132616875),  # log(1 + exp(-1.5)), log(1 + e)
    ("simpo", {"gamma": 0.25}, 0.2519290813, 1.5019290813),  # log(1 + exp(-1.25)), log(1 + exp(1.25))
    ("simpo", {"gamma": 0.25, "smoothing": 0.1}, 0.3769290813, 1.3769290813),  # 0.1 * 1.25 more, 0.1 * 1.25 less
    ("exo", {"smoothing": 0.1}, 0.0311387964, 1.1294572832),  # KL of (0.8176, 0.1824) and of (0.2689, 0.7311) to (0.9, 0.1)
    ("dpop", {"dpop_coef": 3.0}, 0.2014132780, 2.5788897343),  # c < 0 in the second: log(1 + exp(1 + 0.5 * 3))
    ("sppo", {}, 1.0, 8.0),  # (2 - 1)^2 + (-1 + 1)^2, (-1 - 1)^2 + (1 + 1)^2
    ("bco", {}, 0.7873386717, 1.9481539684),  # 0.3132617 + 0.4740770, 2 * 0.9740770
    ("nca", {}, 1.2069310234, 1.6981539684),  # 0.3132617 + (1.3132617 + 0.4740770) / 2, 0.9740770 + (0.4740770 + 0.9740770) / 2
    ("apo_zero", {}, 0.6464820902, 1.2449186624),  # 0.2689414 + 0.3775407, 2 * 0.6224593
    ("apo_down", {}, 0.9134841024, 1.1085992474),  # 0.7310586 + 0.1824255, 0.3775407 + 0.7310586
    ("rpo_bwd_kl", {}, 0.0148838059, 0.4621171573),  # KL of sigma(2) to sigma(1.5); of sigma(1) to sigma(-1): tanh(0.5)
    ("rpo_fwd_kl", {}, 0.0167274950, 0.4621171573),
    ("rpo_sq", {}, 0.25, 4.0),  # (1.5 - 2)^2, (-1 - 1)^2
]


def losses(variant, chosen=CHOSEN, rejected=REJECTED, **settings):
    return pair_losses(LogRatios(chosen=chosen, rejected=rejected, **(GIVEN | settings)), DPOVariant(variant))


@pytest.mark.parametrize(("variant", "settings", "first", "second"), EXPECTED)
def test_by_hand(variant, settings, first, second):
    torch.testing.assert_close(losses(variant, **settings), tensor([first, second], dtype=torch.float64), atol=1e-9, rtol=0)


def test_every_loss_is_worked_out_somewhere():
    in_other_file = {"sigmoid", "ipo", "hinge"}  # test_preference_loss.py
    assert {variant.value for variant in DPOVariant} == in_other_file | {"orpo"} | {name for name, *_ in EXPECTED}


def test_orpo_by_hand():
    """p = 0.8 and 0.5: odds 4 and 1, so -log sigma(log 4) = log(5 / 4); turned around log 5."""
    likely, even = tensor([0.8, 0.5], dtype=torch.float64).log(), tensor([0.5, 0.8], dtype=torch.float64).log()
    torch.testing.assert_close(losses("orpo", likely, even), 0.5 * tensor([1.25, 5.0], dtype=torch.float64).log())


def test_log_odds_near_certainty():
    """log(1 - p) by naive arithmetic is -inf from p = 1 - 6e-8 on; here it is right, and finite at p = 1 with its gradient."""
    for dtype, least in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        logprobs = tensor([-least, -1e-3, -math.log(2), -30.0, -200.0], dtype=dtype, requires_grad=True)
        odds = log_odds(logprobs)
        expected = tensor([-math.log(least) - least / 2, -math.log(math.expm1(1e-3)), 0.0, -30.0, -200.0], dtype=dtype)
        torch.testing.assert_close(odds, expected, rtol=1e-6, atol=1e-6)
        odds.sum().backward()  # 1 / (1 - p)
        torch.testing.assert_close(logprobs.grad, 1 / -torch.expm1(logprobs.detach()), rtol=1e-5, atol=0)
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).sum().backward()
    assert log_odds(certain).isfinite().all() and certain.grad.isfinite().all()


@pytest.mark.parametrize("variant", list(DPOVariant))
def test_far_log_ratios_stay_finite(variant):
    for far in (1e4, -1e4):
        chosen, rejected = (x.clone().requires_grad_() for x in (tensor([far]), tensor([-far])))
        settings = {"smoothing": 0.1 * variant.takes_smoothing, "dpop_coef": 1.0, "margins": tensor([3.0])}
        loss = losses(variant, -chosen.abs() if variant is DPOVariant.orpo else chosen, rejected.clamp(max=-0.1), **settings)
        loss.sum().backward()
        assert loss.isfinite().all() and chosen.grad.isfinite().all() and rejected.grad.isfinite().all()


MASK = tensor([[0, 1, 1, 0], [0, 1, 1, 1]]).bool()
LOGPROBS = tensor([[9.0, -0.5, -1.5, 9.0], [9.0, -1.0, -2.0, -4.5]], dtype=torch.float64)  # means -1 and -2.5
BATCH = PreferenceBatch(tokens=torch.zeros(2, 4, dtype=torch.int64), lengths=tensor([3, 4]), loss_mask=MASK, margins=tensor([1.5]))


def run(batch=BATCH, **settings):
    logprobs = LOGPROBS.clone().requires_grad_()
    result = dpo_loss(TokenOutputs(logprobs=logprobs), batch, **settings)
    result.total.backward()
    return result, logprobs.grad


def test_rpo_learns_how_much_better_a_response_is():
    """l - ref sums to 0.5 and -1.5: beta D = 1 against eta * 1.5 = 3."""
    reference = replace(BATCH, ref_logprobs=tensor([[0.0, -1.0, -1.5, 0.0], [0.0, -1.0, -2.0, -3.0]]))
    assert run(reference, beta=0.5, eta=2.0, variant=DPOVariant.rpo_sq)[0].total.item() == pytest.approx(4.0)


def test_which_losses_need_what():
    assert [v.value for v in DPOVariant if not v.needs_reference] == ["simpo", "cpo", "orpo"]
    assert [v.value for v in DPOVariant if v.needs_margins] == ["rpo_bwd_kl", "rpo_fwd_kl", "rpo_sq"]
    assert [v.value for v in DPOVariant if v.averages] == ["ipo", "simpo", "orpo"]
    with pytest.raises(ValueError, match=r"PreferenceBatch\.ref_logprobs is needed"):
        run(beta=0.1, variant=DPOVariant.bco)
    with pytest.raises(ValueError, match="label_smoothing is 0, expected a number above it for variant exo"):
        run(beta=0.1, variant=DPOVariant.exo)
