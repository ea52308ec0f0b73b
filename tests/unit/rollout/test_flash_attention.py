"""How the flash-attn packages are called, against stand-ins with their signatures that attend in plain torch. The packages themselves need
a GPU."""

from __future__ import annotations

import logging
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from aligner.rollout.builtin import paged_kernels
from aligner.rollout.builtin.attention import (
    DecodeBatch,
    GatheredAttention,
    PagedKV,
    PrefillChunk,
    plan_decode,
    plan_prefill,
)
from aligner.rollout.builtin.paged_kernels import (
    FLASH_2,
    FLASH_3,
    TORCH,
    TorchFlashAttention,
    attends_right,
    flash_attention,
    load,
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


def torch_2(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None
):
    """Torch's `varlen_attn` over pages, with the rules of its kernel (`mha_varlen_fwd`)."""
    rows, heads = len(seqused_k), query.shape[1]
    assert key.shape[1] % 256 == 0 and max_k == block_table.shape[1] * key.shape[1] and window_size == (-1, 0)
    assert heads == key.shape[2] or enable_gqa
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.shape == cu_seq_k.shape == (rows + 1,)
    assert cu_seq_q.tolist() == [max_q * row for row in range(rows + 1)] and query.shape[0] == max_q * rows  # here all have as many
    assert cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
    return attend(query.view(rows, max_q, heads, -1), key, value, seqused_k, block_table, True).flatten(0, 1)


MODULES = {
    FLASH_2.module: (lambda: load(FLASH_2), {"flash_attn_with_kvcache": flash_2}),
    FLASH_3.module: (lambda: load(FLASH_3), {"flash_attn_with_kvcache": flash_3}),
    TORCH.module: (lambda: load(TORCH), {"varlen_attn": torch_2}),
}


@pytest.mark.parametrize("module", MODULES)
def test_it_attends_as_the_reference_does(module, monkeypatch):
    load_it, names = MODULES[module]
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**names))
    flash = load_it()
    assert flash.name == module and attends_right(flash, torch.zeros(1), (2, 3, 8))
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
    for module in (types.SimpleNamespace(), None):
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        assert load(FLASH_2) is None
    for module in (types.SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: None), None):  # an older torch has no pages
        monkeypatch.setitem(sys.modules, TORCH.module, module)
        assert load(TORCH) is None


def test_a_kernel_that_fails_or_attends_otherwise_is_left_alone(monkeypatch, caplog):
    def failing(query, *args, window_size=None, enable_gqa=None, seqused_k=None, block_table=None):
        raise RuntimeError("no kernel image is available for execution on the device")

    def all_pages(query, key, value, *args, seqused_k=None, block_table=None, window_size=None, enable_gqa=None):
        return torch_2(query, key, value, *args, window_size=window_size, enable_gqa=True, seqused_k=seqused_k, block_table=block_table + 1)

    for function, said in (
        (failing, "which failed: RuntimeError: no kernel image is available for execution on the device"),
        (all_pages, r"which is off by [\d.]+ on two short sequences"),
        (lambda *args, **options: torch_2(*args, **options) * torch.nan, "which is off by nan on two short sequences"),
    ):
        monkeypatch.setitem(sys.modules, TORCH.module, types.SimpleNamespace(varlen_attn=function))
        caplog.clear()
        attention = TorchFlashAttention(TORCH, function)
        with caplog.at_level(logging.WARNING):
            assert not attends_right(attention, torch.zeros(1), (1, 2, 8))
        assert re.fullmatch(f"rollouts attend without {TORCH.module}, {said}", *caplog.messages)


def test_the_fastest_that_works_is_taken(monkeypatch):
    class OnGPU:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cpu")

    broken: set[str] = set()
    monkeypatch.setattr(paged_kernels, "attends_right", lambda attention, weight, heads: attention.name not in broken)
    for module, (_, names) in MODULES.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**names))
    major = 9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    found = []
    for _ in range(4):
        attention = flash_attention(OnGPU(), (2, 4, 128))
        found.append(attention and attention.name)
        broken.add(found[-1])
    assert found == ["flash_attn_interface", "flash_attn", TORCH.module, None]
    broken.clear()
    assert flash_attention(OnGPU(), (2, 4, 12)) is None and flash_attention(OnGPU(), (2, 4, 512)) is None
    major = 8
    assert flash_attention(OnGPU(), (2, 4, 128)).name == "flash_attn"


def test_not_on_cpu():
    assert flash_attention(torch.zeros(1, dtype=torch.bfloat16), (1, 1, 64)) is None


@pytest.mark.gpu
def test_installed_packages_take_the_call():
    import inspect

    for package in (FLASH_2, FLASH_3):
        module = pytest.importorskip(package.module)
        assert {"cache_seqlens", "causal", package.table} <= set(inspect.signature(module.flash_attn_with_kvcache).parameters)
