"""Three responses of 1, 2 and 3 tokens by hand: the loss and its gradient are the same however ranks and micro-batches cut them up."""

import pytest
import torch
from torch import tensor

from aligner.losses.aggregation import Aggregation, aggregate, masked

NAN = float("nan")
MASK = tensor([[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)  # the last row is filler
LOSSES = tensor([[NAN, 6.0, NAN, 9.0], [5.0, 1.0, 3.0, 7.0], [NAN, 2.0, 4.0, 9.0], [8.0, 8.0, 8.0, NAN]])
EXPECTED = {
    # 6 + 4 + 15 over 6 tokens; each token weighs 1/6
    Aggregation.token_mean: (25 / 6, [[0, 1 / 6, 0, 0], [0, 1 / 6, 1 / 6, 0], [0, 1 / 6, 1 / 6, 1 / 6], [0] * 4]),
    # (6 + 2 + 5) / 3; a token weighs 1/3 over its response's length
    Aggregation.sequence_mean: (13 / 3, [[0, 1 / 3, 0, 0], [0, 1 / 6, 1 / 6, 0], [0, 1 / 9, 1 / 9, 1 / 9], [0] * 4]),
    # 25 / 10 / 3; each token weighs 1/30
    Aggregation.sequence_sum_constant: (25 / 30, [[0, 1 / 30, 0, 0], [0, 1 / 30, 1 / 30, 0], [0, 1 / 30, 1 / 30, 1 / 30], [0] * 4]),
}
CUTS = {  # ranks, of micro-batches, of rows
    "one": [[[0, 1, 2, 3]]],
    "micro-batches": [[[0], [1, 2], [3]]],
    "ranks": [[[0, 3]], [[1, 2]]],
    "uneven ranks": [[[2], [0]], [[1], [3]]],
    "a rank with filler only": [[[0, 1, 2]], [[3]]],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_by_hand(aggregation, cut):
    per_token = LOSSES.clone().requires_grad_()
    parts = [aggregate(per_token[rows], MASK[rows], aggregation, 10.0) for rank in CUTS[cut] for rows in rank]
    loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
    loss.backward()
    value, gradient = EXPECTED[aggregation]
    assert loss.item() == pytest.approx(value)
    torch.testing.assert_close(per_token.grad, tensor(gradient, dtype=torch.float32))


def test_what_is_masked_has_neither_value_nor_gradient():
    x = tensor([[NAN, 2.0, float("inf")]], requires_grad=True)
    y = masked(x.log(), tensor([[False, True, False]]))
    y.sum().backward()
    assert y[0].tolist() == pytest.approx([0.0, 0.6931472, 0.0]) and torch.isfinite(y).all()
    assert not x.grad[0, 2] and x.grad[0, 1] == 0.5


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_a_constant_that_is_none(constant):
    with pytest.raises(ValueError, match="aggregation_constant is"):
        aggregate(LOSSES, MASK, Aggregation.sequence_sum_constant, constant)
