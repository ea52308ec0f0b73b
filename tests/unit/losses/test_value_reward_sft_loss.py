import pytest
import torch
from torch import tensor

from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.losses.sft import sft_loss
from aligner.losses.value import explained_variance, value_loss
from aligner.telemetry.metrics import merge, values
from aligner.types import LabeledBatch, PreferenceBatch, TokenOutputs, ValueBatch
from aligner.types.rows import take_rows

# v_old 1 everywhere, clip 0.2:   v    1.1   1.5   0.4   1.5
#                                 G    2     1     1     2
#                            v_clip    1.1   1.2   0.8   1.2
#        0.5 max((v-G)^2, (v_clip-G)^2) 0.405 0.125 0.18  0.32    sum 1.03
MASK = tensor([[False, True, True, False], [False, True, True, False]])


def on_tokens(x):
    return torch.zeros(2, 4).masked_scatter(MASK, torch.as_tensor(x, dtype=torch.float32))


VALUES = on_tokens([1.1, 1.5, 0.4, 1.5])
VALUE_BATCH = ValueBatch(
    tokens=torch.zeros(2, 4, dtype=torch.int64),
    lengths=tensor([3, 3]),
    loss_mask=MASK,
    old_values=on_tokens([1.0] * 4),
    returns=on_tokens([2.0, 1.0, 1.0, 2.0]),
)


def test_value_loss_by_hand():
    predicted = VALUES.clone().requires_grad_()
    result = value_loss(TokenOutputs(values=predicted), VALUE_BATCH, clip=0.2)
    result.total.backward()
    assert result.total.item() == pytest.approx(1.03, abs=1e-6) and result.count.item() == 4
    # v - G, and none where the clipped value is further from the return
    torch.testing.assert_close(predicted.grad, on_tokens([-0.9, 0.5, -0.6, 0.0]))
    numbers = values(result.metrics)
    assert numbers["value/loss"] == pytest.approx(0.2575, abs=1e-6)
    assert numbers["value/clip_fraction"] == pytest.approx(0.75)
    assert numbers["value/mean"] == pytest.approx(1.125, abs=1e-6)
    assert numbers["value/return_mean"] == pytest.approx(1.5)


def test_values_are_clipped_around_the_old_values():
    """Equal old and new values are inside every clip range, however far both are from the returns."""
    made = ValueBatch(
        tokens=VALUE_BATCH.tokens, lengths=VALUE_BATCH.lengths, loss_mask=MASK, old_values=VALUES, returns=VALUE_BATCH.returns
    )
    result = value_loss(TokenOutputs(values=VALUES), made, clip=0.01)
    assert values(result.metrics)["value/clip_fraction"] == 0.0
    assert result.total.item() == value_loss(TokenOutputs(values=VALUES), made, clip=None).total.item()


def test_explained_variance_is_exact_over_micro_batches():
    # errors 0.9 -0.5 0.6 0.5: variance 0.4175 - 0.375^2 = 0.276875; returns 2 1 1 2: variance 0.25
    rows = [slice(i, i + 1) for i in range(2)]
    parts = [value_loss(TokenOutputs(values=VALUES[row]), take_rows(VALUE_BATCH, row), clip=0.2).metrics for row in rows]
    assert explained_variance(values(merge(parts))) == pytest.approx(1 - 0.276875 / 0.25, abs=1e-6)


def test_explained_variance_of_perfect_values_and_of_equal_returns():
    perfect = value_loss(TokenOutputs(values=VALUE_BATCH.returns), VALUE_BATCH, clip=None).metrics
    assert explained_variance(values(perfect)) == pytest.approx(1.0)
    row = take_rows(VALUE_BATCH, slice(0, 1))
    flat = ValueBatch(
        tokens=row.tokens, lengths=row.lengths, loss_mask=row.loss_mask, old_values=row.old_values, returns=row.old_values * 0.3
    )
    undefined = explained_variance(values(value_loss(TokenOutputs(values=VALUES[:1]), flat, clip=None).metrics))
    assert undefined != undefined  # NaN


@pytest.mark.parametrize(
    ("outputs", "clip", "named"), [(TokenOutputs(), 0.2, r"TokenOutputs\.values"), (TokenOutputs(values=VALUES), 0.0, "clip is 0.0")]
)
def test_value_loss_refuses(outputs, clip, named):
    with pytest.raises(ValueError, match=named):
        value_loss(outputs, VALUE_BATCH, clip=clip)


# chosen 2 0, rejected 1 1: d = 1, -1; margins 0.5 and -2
SCORES = tensor([[2.0], [1.0], [0.0], [1.0]])
PAIRS = PreferenceBatch(
    tokens=torch.zeros(4, 3, dtype=torch.int64),
    lengths=tensor([3, 3, 3, 3]),
    loss_mask=torch.ones(4, 3, dtype=torch.bool),
    margins=tensor([0.5, -2.0]),
)


@pytest.mark.parametrize(
    ("variant", "total"),
    [
        (BradleyTerry.standard, 0.31326169 + 1.31326169),
        (BradleyTerry.margin, 0.47407698 + 3.04858735),  # d - |m| = 0.5, -3
        (BradleyTerry.scaled, 0.5 * 0.31326169 + 2 * 1.31326169),
    ],
)
def test_bradley_terry_by_hand(variant, total):
    result = bradley_terry_loss(TokenOutputs(scores=SCORES), PAIRS, variant=variant)
    assert result.total.item() == pytest.approx(total, abs=1e-6) and result.count.item() == 2
    numbers = values(result.metrics)
    assert numbers["reward/loss"] == pytest.approx(total / 2, abs=1e-6)
    assert numbers["reward/accuracy"] == 0.5
    assert (numbers["reward/margin"], numbers["reward/chosen_mean"], numbers["reward/rejected_mean"]) == (0.0, 1.0, 1.0)


def test_bradley_terry_centring():
    result = bradley_terry_loss(TokenOutputs(scores=SCORES), PAIRS, variant=BradleyTerry.standard, centre_coef=0.01)
    assert result.total.item() == pytest.approx(1.62652338 + 0.01 * (9 + 1), abs=1e-6)


@pytest.mark.parametrize(
    ("outputs", "named"),
    [(TokenOutputs(), r"TokenOutputs\.scores is needed"), (TokenOutputs(scores=torch.ones(4, 2)), r"\(4, 2\), expected \(4, 1\)")],
)
def test_bradley_terry_refuses(outputs, named):
    with pytest.raises(ValueError, match=named):
        bradley_terry_loss(outputs, PAIRS, variant=BradleyTerry.standard)


def test_sft_by_hand():
    mask = tensor([[False, True, True], [False, False, True]])
    made = LabeledBatch(tokens=torch.zeros(2, 3, dtype=torch.int64), lengths=tensor([3, 3]), loss_mask=mask)
    logprobs = tensor([[0.0, -1.0, -2.0], [0.0, -9.0, -0.5]], requires_grad=True)
    result = sft_loss(TokenOutputs(logprobs=logprobs), made)
    result.total.backward()
    assert result.total.item() == 3.5 and result.count.item() == 3
    assert values(result.metrics)["sft/loss"] == pytest.approx(3.5 / 3)
    torch.testing.assert_close(logprobs.grad, -mask.float())
    with pytest.raises(ValueError, match=r"TokenOutputs\.logprobs"):
        sft_loss(TokenOutputs(), made)
