"""KTO against numbers worked out by hand: the loss, the estimate of the KL, and what they do not depend on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from aligner.losses.preference import kl_baseline, kto_loss, mean_log_ratio
from aligner.telemetry.metrics import values
from aligner.types import LabeledBatch, TokenOutputs

# Log-ratios: 2 over two tokens (good), -1 over one (bad), 3 over three (bad), 0 over one (good); the last row is filler.
MASK = tensor([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
RATIOS = tensor([[9, 0.5, 1.5, 9], [9, 9, -1, 9], [9, 1, 1, 1], [9, 9, 9, 0], [9, 9, 9, 9]], dtype=torch.float64)
REFERENCE = torch.full((5, 4), -2.0)
LOGPROBS = RATIOS + REFERENCE
BATCH = LabeledBatch(
    tokens=torch.zeros(5, 4, dtype=torch.int64),
    lengths=torch.full((5,), 4),
    loss_mask=MASK,
    labels=tensor([[1.0], [-1.0], [-1.0], [1.0], [1.0]]),
    ref_logprobs=REFERENCE,
)


def sigma(x):
    return 1 / (1 + math.exp(-x))


def run(batch=BATCH, logprobs=LOGPROBS, **settings):
    logprobs = logprobs.clone().requires_grad_()
    result = kto_loss(TokenOutputs(logprobs=logprobs), batch, **({"kl": 1.0, "beta": 0.5} | settings))
    result.total.backward()
    return result, logprobs.grad


def test_by_hand():
    """beta (d - z) = 0.5, -1, 1, -0.5: sigma(-0.5) and sigma(0.5) where desirable, sigma(-1) and sigma(1) where not."""
    result, gradient = run(desirable_weight=2.0, undesirable_weight=1.5)
    assert result.total.item() == pytest.approx(2.0 * (0.3775406688 + 0.6224593312) + 1.5 * (0.2689414214 + 0.7310585786))
    assert result.count.item() == 4
    # d/dd: -+ weight * beta * sigma(x) sigma(-x)
    slopes = [-1 * sigma(0.5) * sigma(-0.5), 0.75 * sigma(1) * sigma(-1), 0.75 * sigma(1) * sigma(-1), -1 * sigma(0.5) * sigma(-0.5), 0]
    torch.testing.assert_close(gradient, tensor(slopes, dtype=torch.float64)[:, None] * MASK)
    numbers = values(result.metrics)
    assert numbers["kto/accuracy"] == 0.5 and numbers["kto/kl"] == 1.0
    assert (numbers["kto/desirable_reward"], numbers["kto/undesirable_reward"]) == pytest.approx(
        (0.5, 0.5)
    )  # 0.5 * mean(2, 0), mean(-1, 3)
    assert numbers["kto/loss"] == pytest.approx(result.total.item() / 4)


def test_the_kl_estimate_by_hand():
    """(2 - 1 + 3 + 0) / 4 over the rows that have a response; of averages (1 - 1 + 1 + 0) / 4."""
    assert kl_baseline([mean_log_ratio(LOGPROBS, REFERENCE, MASK)]) == 1.0
    assert kl_baseline([mean_log_ratio(LOGPROBS, REFERENCE, MASK, average_logprobs=True)]) == 0.25
    assert kl_baseline([mean_log_ratio(REFERENCE, LOGPROBS, MASK)]) == 0.0  # a negative estimate of a KL is none
    with pytest.raises(ValueError, match="no row has a response token"):
        kl_baseline([mean_log_ratio(LOGPROBS, REFERENCE, torch.zeros_like(MASK))])


def test_the_kl_of_several_batches_is_that_of_all_their_rows():
    """3 of one row and -1 of three: 0 in all; the mean of what is above 0 in each batch would be 1.5."""
    ratios = tensor([[3.0], [-1.0], [-1.0], [-1.0]])
    parts = [mean_log_ratio(ratios[a:b], torch.zeros(b - a, 1), torch.ones(b - a, 1, dtype=torch.bool)) for a, b in ((0, 1), (1, 4))]
    assert kl_baseline(parts) == 0.0 and kl_baseline(parts[:1]) == 3.0


def test_averages_and_the_supervised_term():
    """d of averages: 1, -1, 1, 0. NLL per token of the good responses: 2 - 1 = 1 and 2."""
    plain = sigma(-0.5 * 0) + sigma(-1) + sigma(0) + sigma(0.5)
    assert run(average_logprobs=True)[0].total.item() == pytest.approx(plain)
    result, gradient = run(sft_coef=0.1)
    base, base_gradient = run()
    assert (result.total - base.total).item() == pytest.approx(0.1 * (1 + 2))
    assert values(result.metrics)["kto/sft_loss"] == pytest.approx(1.5)
    weights = tensor([-0.05, 0, 0, -0.1, 0], dtype=torch.float64)
    torch.testing.assert_close(gradient - base_gradient, weights[:, None] * MASK)


@pytest.mark.parametrize(
    ("batch", "settings", "named"),
    [
        (BATCH, {"beta": 0.0}, "beta is 0.0"),
        (replace(BATCH, labels=None), {}, r"LabeledBatch\.labels is needed"),
        (replace(BATCH, labels=torch.ones(5, 2)), {}, r"labels is \(5, 2\), expected \(5, 1\)"),
        (replace(BATCH, ref_logprobs=None), {}, r"LabeledBatch\.ref_logprobs is needed"),
    ],
)
def test_refusals(batch, settings, named):
    with pytest.raises(ValueError, match=named):
        run(batch, **settings)
