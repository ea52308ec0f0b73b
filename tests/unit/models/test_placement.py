"""Where tokens lie in the model's input, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.training.placement import Splits, input_shape, place
from aligner.types import TokenBatch

pytestmark = pytest.mark.usefixtures("topology")


def batch() -> TokenBatch:
    return TokenBatch(tokens=torch.tensor([[11, 12, 13, 0], [21, 22, 0, 0]]), lengths=torch.tensor([3, 2]))


def test_padded_rows():
    placed = place(batch(), Splits())
    assert placed.tokens.tolist() == [[11, 12, 13], [21, 22, 0]]
    assert placed.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert placed.token_of.tolist() == [[0, 1, 2], [4, 5, -1]]
    assert placed.next_token_of.tolist() == [[1, 2, -1], [5, -1, -1]]
    assert placed.padding.tolist() == [[False, False, False], [False, False, True]]
    assert placed.packed is None and placed.whole_shape == (2, 3)


def test_packed_rows():
    placed = place(batch(), Splits(packed=True, sequence_parallel_size=4))  # 5 tokens in multiples of 4: 3 of padding
    assert placed.tokens.tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
    assert placed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert placed.token_of.tolist() == [[0, 1, 2, 4, 5, -1, -1, -1]]
    assert placed.next_token_of.tolist() == [[1, 2, -1, 5, -1, -1, -1, -1]]
    assert placed.packed.cu_seqlens_q.tolist() == [0, 3, 5, 8] and placed.packed.max_seqlen_q == 3


def test_packed_rows_of_a_fixed_size():
    splits = Splits(packed=True, fixed_tokens=9, sequence_parallel_size=4)
    assert input_shape([], splits) == input_shape([3, 2], splits) == (1, 12)
    placed = place(batch(), splits)
    assert placed.whole_shape == (1, 12) and placed.token_of.tolist() == [[0, 1, 2, 4, 5, -1, -1, -1, -1, -1, -1, -1]]
    assert placed.packed.cu_seqlens_q.tolist() == [0, 3, 5, 12]
    with pytest.raises(ConfigError, match="model.micro_batch_tokens=9: sequences that must share a micro-batch have 10 tokens"):
        input_shape([6, 4], splits)
