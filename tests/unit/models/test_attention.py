"""Attention in parts equals attention in one piece, outputs and gradients."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from aligner.models.modules import attention
from aligner.models.modules.attention import all_runs, takes_all_runs
from aligner.models.modules.shared_prompts import key_spans
from aligner.parallel.context import chunk_numbers, local_slots
from aligner.types import TokenBatch


def test_chunks_of_a_sequence():
    """Of 4 ranks, rank 1 holds the second and the seventh of eight chunks."""
    assert [chunk_numbers(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert chunk_numbers(0, 1) == (0,)
    assert local_slots(16, 1, 4).tolist() == [2, 3, 12, 13]
    assert local_slots(3, 0, 1).tolist() == [0, 1, 2]


def kernel_of_runs(query, key, value, queries, keys, most_queries, most_keys, dropout, is_causal, debug, *, scale):
    """FlashAttention for sequences of several lengths, as its documentation defines it: causal, aligned at the ends."""
    assert is_causal and dropout == 0.0 and not debug
    sizes = [(b - a, d - c) for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)]
    assert (most_queries, most_keys) == (max(q for q, _ in sizes), max(k for _, k in sizes))
    assert (queries[-1], keys[-1]) == (query.shape[0], key.shape[0]) and queries.dtype == keys.dtype == torch.int32
    outs = []
    for q, k, v in zip(*(x.split([size[own] for size in sizes]) for x, own in ((query, 0), (key, 1), (value, 1))), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs), None


@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize(
    "segments", [[(0, 5, -1), (5, 6, -1), (6, 14, -1)], [(0, 4, -1), (4, 9, 0), (9, 11, 0), (11, 13, -1), (13, 14, -1)]]
)
def test_all_runs_of_a_packed_row_in_one_call(segments, groups, monkeypatch, topology):
    monkeypatch.setattr(attention, "_kernel_of_runs", kernel_of_runs)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(14, 4, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(14, groups, 8, generator=generator, requires_grad=True) for _ in range(2))
    grad = torch.randn(14, 4, 8, generator=generator)
    expected, got = (
        attention.shared_attention(q, k, v, segments, 0.3),
        attention.all_runs(q, k, v, key_spans(segments, 0, 1), 0.3),
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cp", [2, 3])
def test_all_runs_of_a_context_parallel_rank_in_one_call(cp, monkeypatch, topology):
    """Every rank's two chunks of each sequence attend to the gathered keys as they do in the whole sequence."""
    monkeypatch.setattr(attention, "_kernel_of_runs", kernel_of_runs)
    bounds = [0, 2 * cp, 8 * cp]  # chunks of one token, and of three
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(bounds[-1], heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = attention.shared_attention(q, k, v, [(bounds[0], bounds[1], -1), (bounds[1], bounds[2], -1)], 0.3)
    pairs = list(zip(bounds[:-1], bounds[1:], strict=True))
    slots = [torch.cat([start + local_slots(stop - start, rank, cp) for start, stop in pairs]) for rank in range(cp)]
    gathered_k, gathered_v = (torch.cat([x[own] for own in slots]) for x in (k, v))
    for rank, own in enumerate(slots):
        spans = key_spans([(start // cp, stop // cp, -1) for start, stop in pairs], rank, cp)
        out = attention.all_runs(q[own], gathered_k, gathered_v, spans, 0.3)
        torch.testing.assert_close(out, whole[own], rtol=1e-5, atol=1e-5)


def test_the_kernel_takes_what_it_is_given(topology):
    """torch's own operator, on tensors without contents: its arguments and the shape of what it gives."""
    spans = key_spans([(0, 4, -1), (4, 9, 0), (9, 11, 0)], 0, 1).to(torch.device("meta"))
    query, key, value = (torch.empty(11, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    assert all_runs(query, key, value, spans, 0.125).shape == (11, 4, 64)
    on_gpu = {"is_cuda": True, "dtype": torch.bfloat16}
    assert takes_all_runs(SimpleNamespace(**on_gpu, shape=(11, 4, 64)))
    for other in ({"is_cuda": False}, {"dtype": torch.float32}, {"shape": (11, 4, 60)}, {"shape": (11, 4, 264)}):
        assert not takes_all_runs(SimpleNamespace(**({"shape": (11, 4, 64)} | on_gpu | other)))


def test_no_layer_reads_the_bounds_of_packed_rows_back(make_model, monkeypatch):
    """The host knows them: what a layer reads back from a GPU stops it. Nothing in a packed pass turns a tensor into numbers."""
    batch = TokenBatch(tokens=torch.randint(1, 61, (3, 12)), lengths=torch.tensor([12, 7, 9]))
    reads: list[str] = []

    def reading(name: str):
        real = getattr(torch.Tensor, name)

        def read(self, *args):
            reads.append(name)
            return real(self, *args)

        return read

    counts = []
    for layers in (1, 3):
        model = make_model("policy", architecture={"num_layers": layers}, training={"packing": True, "micro_batch_tokens": 64})
        parts = model.model._micro_batches(batch, model.model._plan(batch))
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "__int__", "__bool__"):
                patch.setattr(torch.Tensor, name, reading(name))
            with torch.no_grad():
                model.chunks[0](parts[0].placement.tokens, parts[0].placement.positions, None, packed_seq_params=parts[0].placement.packed)
        counts.append(len(reads))
        reads.clear()
    assert counts[0] == counts[1] == 0


@pytest.mark.skipif(torch.__version__ < "2.9", reason="the kernels to compare with came with torch 2.9")
def test_grouped_queries_before_torch_2_9(monkeypatch: pytest.MonkeyPatch):
    """Its kernels take as many heads of keys as of queries; outputs and gradients are those of the kernels that take fewer."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    random = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, 6, 5, 8, generator=random) for _ in range(2))
    k, v = (torch.randn(2, 2, 5, 8, generator=random) for _ in range(2))
    forward, backward = (getattr(torch.ops.aten, name) for name in names)
    expected = forward(q, k, v, 0.0, True, scale=0.3)
    expected += backward(grad, q, k, v, *expected, 0.0, True, scale=0.3)

    def strict(kernel, *of_queries_and_keys: int):
        def call(*tensors, scale: float):
            assert len({tensors[i].shape[1] for i in of_queries_and_keys}) == 1
            return kernel(*tensors, scale=scale)

        return call

    monkeypatch.setattr(torch.ops.aten, names[0], strict(forward, 0, 1, 2))
    monkeypatch.setattr(torch.ops.aten, names[1], strict(backward, 1, 2, 3))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0+cpu"))
    older = runpy.run_path(attention.__file__)
    result = older["_kernel"](q, k, v, 0.0, True, scale=0.3)
    result += older["_kernel_backward"](grad, q, k, v, *result, 0.0, True, scale=0.3)
    for found, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(found, wanted)
