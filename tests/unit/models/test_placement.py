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


def test_a_fixed_shape_adds_columns_and_rows():
    placed = place(batch(), Splits(), shape=(3, 6))
    assert placed.tokens.tolist() == [[11, 12, 13, 0, 0, 0], [21, 22, 0, 0, 0, 0], [0] * 6]
    assert placed.next_token_of.tolist() == [[1, 2, -1, -1, -1, -1], [5, -1, -1, -1, -1, -1], [-1] * 6]


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


@pytest.mark.parametrize(("rank", "slots"), [(0, [0, 3]), (1, [1, 2])])
def test_context_parallel_ranks_hold_an_early_and_a_late_chunk(rank, slots):
    whole = place(batch(), Splits(), shape=(2, 4))
    part = place(batch(), Splits(cp_rank=rank, cp_size=2))
    for name in ("tokens", "positions", "token_of", "next_token_of"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, slots])
    assert part.whole_shape == (2, 4)


def test_context_parallel_packed_rows_are_split_one_by_one():
    splits = [Splits(cp_rank=rank, cp_size=2, packed=True) for rank in range(2)]
    first, second = (place(batch(), split) for split in splits)  # each row becomes 4 slots
    assert first.tokens.tolist() == [[11, 0, 21, 0]] and second.tokens.tolist() == [[12, 13, 22, 0]]
    assert first.positions.tolist() == [[0, 3, 0, 3]] and second.positions.tolist() == [[1, 2, 1, 2]]
    assert first.next_token_of.tolist() == [[1, -1, 5, -1]] and second.next_token_of.tolist() == [[2, -1, -1, -1]]
    assert first.packed.cu_seqlens_q.tolist() == [0, 4, 8]  # of the whole row


@pytest.mark.parametrize(("splits", "row", "total"), [((1, 1), 1, 1), ((1, 4), 4, 4), ((2, 1), 4, 4), ((2, 4), 8, 8), ((4, 3), 24, 24)])
def test_multiples(splits, row, total):
    """2 cp for the chunks, cp x tp for sequence parallelism of a rank's part; packed, the second concerns the sum only."""
    padded = Splits(cp_size=splits[0], sequence_parallel_size=splits[1])
    assert (padded.row_multiple, padded.total_multiple) == (row, total)
    packed = Splits(cp_size=splits[0], sequence_parallel_size=splits[1], packed=True)
    assert packed.row_multiple == (1 if splits[0] == 1 else 2 * splits[0])
    assert packed.total_multiple == total


def test_packed_rows_for_our_own_attention_are_known_on_the_host():
    """Of 2 ranks each holds half of every row: the first and the last quarter, or the two between."""
    alone = place(batch(), Splits(packed=True, segmented=True, sequence_parallel_size=4)).packed
    assert alone.segments == ((0, 3, -1), (3, 5, -1), (5, 8, -1)) and alone.cu_seqlens_q is None
    assert alone.spans.queries.tolist() == alone.spans.keys.tolist() == [0, 3, 5, 8] and alone.spans.slots is None
    assert (alone.spans.most_queries, alone.spans.most_keys) == (3, 3)
    first, second = (place(batch(), Splits(cp_rank=rank, cp_size=2, packed=True, segmented=True)).packed for rank in range(2))
    assert first.segments == second.segments == ((0, 2, -1), (2, 4, -1))
    assert first.positions.tolist() == [0, 3, 0, 3] and second.positions.tolist() == [1, 2, 1, 2]
    assert first.spans.queries.tolist() == [0, 1, 2, 3, 4] and first.spans.keys.tolist() == [0, 1, 5, 6, 10]
    # Slots 0 to 3 are rank 0's, 4 to 7 rank 1's: quarters 0, 3, 0, 3 and 1, 2, 1, 2 of the two rows.
    assert first.spans.slots.tolist() == [0, 0, 4, 5, 1, 2, 2, 6, 7, 3]
    assert second.spans.slots.tolist() == [0, 4, 0, 4, 5, 2, 6, 2, 6, 7]
