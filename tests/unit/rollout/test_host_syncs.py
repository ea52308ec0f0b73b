"""Passes of the built-in engine read nothing back from the device but what was drawn: counted on the CPU, in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from host_syncs import HostSyncs
from rollout_parts import decoder_of

from aligner.rollout.builtin.attention import (
    DecodeBatch,
    GatheredAttention,
    PagedKV,
    PrefillChunk,
    attend,
    plan_decode,
    plan_prefill,
    prefill_attention,
)

pytestmark = pytest.mark.cpu

CHUNKS = [  # three sizes of attention call, and one that goes on
    PrefillChunk(tokens=[1] * 7, start=0, pages=[0, 1], wants_logits=True),
    PrefillChunk(tokens=[2] * 5, start=0, pages=[2, 3], wants_logits=False),
    PrefillChunk(tokens=[3], start=0, pages=[4], wants_logits=True),
    PrefillChunk(tokens=[4] * 3, start=5, pages=[5, 6], wants_logits=True),
]


def test_prefill_attention_waits_for_nothing_and_attends_to_each_sequence_alone():
    torch.manual_seed(0)
    plan, size = plan_prefill(CHUNKS, 4, torch.device("cpu")), 8
    assert plan.wanted.tolist() == [6, 12, 15] and plan.positions.tolist() == [*range(7), *range(5), 0, 5, 6, 7]
    assert plan.slots.tolist() == [*range(7), *range(8, 13), 16, 25, 26, 27]
    cache = PagedKV(keys=torch.randn(1, 8, 4, 2, size), values=torch.randn(1, 8, 4, 2, size))
    queries, keys, values = torch.randn(16, 2, 3, size), torch.randn(16, 2, size), torch.randn(16, 2, size)
    for slots, own in zip(cache.slots(0), (keys, values), strict=True):
        slots.index_copy_(0, plan.slots, own)
    with HostSyncs() as syncs:
        found = prefill_attention((queries, keys, values), cache, 0, plan, GatheredAttention(4))
    assert syncs.found == []
    first = 0
    for chunk in CHUNKS:
        last = first + len(chunk.tokens)
        past = [slots[20 : 20 + chunk.start] for slots in cache.slots(0)]
        whole = (torch.cat([old, new[first:last]])[None] for old, new in zip(past, (keys, values), strict=True))
        torch.testing.assert_close(found[first:last], GatheredAttention(1).fresh(queries[None, first:last], *whole)[0])
        first = last


DELTA = {"linear_attention_layers": [0], "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_head_dim": 4, "attention_gate": True}
DELTA |= {"linear_value_head_dim": 6, "linear_conv_size": 4}


@pytest.mark.parametrize("name", ["dense", "experts", "delta nets"])
def test_a_decode_step_of_a_model_waits_for_nothing(topology, make_model, name):
    from aligner.rollout.config import Kernels

    experts = {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
    policy = make_model("policy", architecture={"experts": experts, "delta nets": DELTA}.get(name, {}))
    decoder = decoder_of(policy, kernels=Kernels.torch)
    assert not decoder.fixed_shapes  # on a CPU each expert has its own tokens only
    cache, pages = decoder.new_cache(4), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    batch = DecodeBatch(tokens=torch.tensor([5, 6]), positions=torch.tensor([3, 17]), pages=pages, seats=torch.tensor([0, 1]))
    if cache.states is not None:
        cache.states.reserve(2)
    expected = decoder.decode(batch, cache)
    cache.clear()
    out, decoder.fixed_shapes = torch.empty_like(expected), True
    with HostSyncs() as syncs:
        decoder._step(batch, cache, out)
    assert syncs.found == []
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_attention_on_a_gpu_leaves_cudnn_out(monkeypatch):
    """Its kernels build a plan for every shape."""
    allowed = []
    real = F.scaled_dot_product_attention

    def recorded(*args, **options):
        cuda = torch.backends.cuda
        allowed.append((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()))
        return real(*args, **options)

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    queries, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    expected = real(queries, keys, keys)
    assert torch.equal(attend(queries.as_subclass(OnGPU), keys, keys).as_subclass(torch.Tensor), expected)
    assert allowed == [(True, True, True, False)]
    assert torch.equal(attend(queries, keys, keys), expected) and allowed[1:] == [(True, True, True, True)]
    batch = DecodeBatch(tokens=torch.tensor([1]), positions=torch.tensor([2]), pages=torch.tensor([[0]], dtype=torch.int32))
    cache = PagedKV(keys=torch.randn(1, 2, 4, 1, 8), values=torch.randn(1, 2, 4, 1, 8))
    GatheredAttention(4).decode(torch.randn(1, 1, 1, 8).as_subclass(OnGPU), cache, 0, plan_decode(batch, 4))
    assert allowed[2:] == [(True, True, True, False)]
