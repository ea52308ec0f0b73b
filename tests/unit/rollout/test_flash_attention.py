"""How the flash-attn packages are called, against stand-ins with their signatures that attend in plain torch. The packages themselves need
a GPU."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from aligner.rollout.attention import (
    FLASH_2,
    FLASH_3,
    DecodeBatch,
    GatheredAttention,
    PagedKV,
    PrefillChunk,
    flash_attention,
    load,
    plan_decode,
    plan_prefill,
)


def attend(q, k_cache, v_cache, lengths, table, causal):
    """FlashAttention's meaning: the last tokens of each sequence, aligned at the end."""
    assert lengths.dtype == torch.int32 and table.dtype == torch.int32 and table.shape[0] == q.shape[0] and causal
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        k, v = (cache[table[row].long()].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        share = q.shape[2] // k.shape[0]
        mask = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
        rows = F.scaled_dot_product_attention(q[row].transpose(0, 1), k.repeat_interleave(share, 0), v.repeat_interleave(share, 0), mask)
        out[row] = rows.transpose(0, 1)
    return out


def flash_2(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False):
    assert k_cache.shape[1] % 256 == 0  # "Paged KV cache block size must be divisible by 256"
    return attend(q, k_cache, v_cache, cache_seqlens, block_table, causal)


def flash_3(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None, softmax_scale=None, causal=False):
    return attend(q, k_cache, v_cache, cache_seqlens, page_table, causal)


@pytest.mark.parametrize(("package", "function"), [(FLASH_2, flash_2), (FLASH_3, flash_3)], ids=["2", "3"])
def test_it_attends_as_the_reference_does(package, function, monkeypatch):
    monkeypatch.setitem(sys.modules, package.module, types.SimpleNamespace(flash_attn_with_kvcache=function))
    flash = load(package)
    size = flash.page_size
    reference = GatheredAttention(size)
    torch.manual_seed(0)
    keys, values = (torch.randn(2, 6, size, 2, 8) for _ in range(2))
    cache = PagedKV(keys=keys, values=values)
    pages = torch.tensor([[4, 0], [2, 3], [1, 0]], dtype=torch.int32)
    batch = DecodeBatch(tokens=torch.zeros(3, dtype=torch.int64), positions=torch.tensor([0, size + 5, size - 1]), pages=pages)
    plan, queries = plan_decode(batch, size), torch.randn(3, 2, 3, 8)
    torch.testing.assert_close(flash.decode(queries, cache, 1, plan), reference.decode(queries, cache, 1, plan))
    chunk = PrefillChunk(tokens=[1] * 10, start=size - 4, pages=[2, 3], wants_logits=True)
    (part,) = plan_prefill([chunk], size, torch.device("cpu")).parts
    queries = torch.randn(10, 2, 3, 8)
    torch.testing.assert_close(flash.prefill(queries, cache, 1, part), reference.prefill(queries, cache, 1, part))


def test_a_package_with_another_signature_is_left_alone(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_with_kvcache=flash_3))
    with caplog.at_level(logging.WARNING):
        assert load(FLASH_2) is None
    assert caplog.messages == ["rollouts attend without flash_attn, whose flash_attn_with_kvcache has no block_table"]
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace())
    assert load(FLASH_2) is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert load(FLASH_2) is None


def test_not_on_cpu():
    assert flash_attention(torch.zeros(1, dtype=torch.bfloat16), 64) is None


@pytest.mark.gpu
def test_installed_packages_take_the_call():
    import inspect

    for package in (FLASH_2, FLASH_3):
        module = pytest.importorskip(package.module)
        assert {"cache_seqlens", "causal", package.table} <= set(inspect.signature(module.flash_attn_with_kvcache).parameters)
