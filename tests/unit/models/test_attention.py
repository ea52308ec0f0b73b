"""Attention in parts equals attention in one piece, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("past", [0, 9])
def test_queries_of_a_late_chunk(groups, past, topology):
    from aligner.models.attention import _attend_to_past

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, groups, past + 6, 8, generator=generator, requires_grad=True) for _ in range(2))
    mask = torch.ones(6, past + 6, dtype=torch.bool).tril(past)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    grad = torch.randn(expected.shape, generator=generator)
    got = _attend_to_past(q, k, v, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_late_chunk_in_bfloat16(topology):
    from aligner.models.attention import _attend_to_past

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator).bfloat16().requires_grad_() for n in (8, 32, 32))
    mask = torch.ones(8, 32, dtype=torch.bool).tril(24)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, scale=0.25)
    got = _attend_to_past(q, k, v, 0.25)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_chunks_of_a_sequence():
    """Of 4 ranks, rank 1 holds the second and the seventh of eight chunks."""
    from aligner.parallel.context import chunk_numbers, local_slots

    assert [chunk_numbers(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert chunk_numbers(0, 1) == (0,)
    assert local_slots(16, 1, 4).tolist() == [2, 3, 12, 13]
    assert local_slots(3, 0, 1).tolist() == [0, 1, 2]
