"""Gated delta nets: token by token by hand, by chunks, packed, cut in pieces; and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import check_divisible, check_together
from aligner.models.config import Architecture, ModelConfig
from aligner.models.modules import gated_delta_net
from aligner.models.modules.gated_delta_net import Tokens, chunked, convolved, step
from aligner.parallel.topology import ParallelConfig

HEADS, KEY, VALUE = 2, 6, 5


def tokens(count: int, *, seed: int = 1) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(count, HEADS, size, generator=generator).requires_grad_() for size in (KEY, KEY, VALUE))
    decay, rate = (-torch.rand(count, HEADS, generator=generator) * 0.2).requires_grad_(), torch.rand(count, HEADS, generator=generator)
    return Tokens(query=query, key=key, value=value, decay=decay, rate=rate.requires_grad_())


def leaves(x: Tokens) -> list[torch.Tensor]:
    return [x.query, x.key, x.value, x.decay, x.rate]


def cut(x: Tokens, start: int, stop: int) -> Tokens:
    return Tokens(**{name: getattr(x, name)[start:stop] for name in ("query", "key", "value", "decay", "rate")})


def one_by_one(x: Tokens, lengths: list[int]) -> torch.Tensor:
    """The definition: S' = exp(g) S + b k (v - exp(g) k S)^T and q S', from zeros for every sequence."""
    outs, start = [], 0
    for length in lengths:
        state = torch.zeros(HEADS, KEY, VALUE)
        for t in range(start, start + length):
            query, key = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (x.query[t], x.key[t]))
            state = state * x.decay[t].exp()[:, None, None]
            error = x.value[t] - torch.einsum("hk,hkv->hv", key, state)
            state = state + x.rate[t][:, None, None] * torch.einsum("hk,hv->hkv", key, error)
            outs.append(torch.einsum("hk,hkv->hv", query, state) / KEY**0.5)
        start += length
    return torch.stack(outs)


@pytest.mark.parametrize("lengths", [[1], [9], [4, 1, 11, 4], [3, 3], [8, 4]])
def test_chunks_give_the_definitions_outputs_and_gradients(lengths, monkeypatch):
    monkeypatch.setattr(gated_delta_net, "CHUNK", 4)
    gated_delta_net._plan.cache_clear()
    x = tokens(sum(lengths))
    weights = torch.randn(sum(lengths), HEADS, VALUE, generator=torch.Generator().manual_seed(2))
    found, expected = chunked(x, lengths)[0], one_by_one(x, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), leaves(x)) for out in (found, expected)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)
    gated_delta_net._plan.cache_clear()


def test_a_sequence_goes_on_from_its_state():
    """In pieces of other sizes than chunks, and token by token: the same outputs and the same state at the end."""
    x, other = tokens(150), tokens(70, seed=3)
    expected, end = chunked(x, [150])
    outs, state = [], None
    for start, stop in pairwise([0, 5, 70, 149]):
        both = Tokens(**{name: torch.cat([getattr(cut(x, start, stop), name), getattr(other, name)]) for name in Tokens.__slots__})
        before = None if state is None else torch.stack([state, torch.zeros_like(state)])
        out, states = chunked(both, [stop - start, 70], before)
        outs.append(out[: stop - start])
        state = states[0]
    last, state = step(cut(x, 149, 150), state[None])
    torch.testing.assert_close(torch.cat([*outs, last]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-4, atol=1e-5)


def test_a_convolution_by_hand():
    """Weights 1, 10, 100 of the token two before, the one before and the token itself; nothing comes from another sequence."""
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    out, tails = convolved(x, torch.tensor([[1.0, 10.0, 100.0]]), [3, 2])
    assert out[:, 0].tolist() == [100.0, 210.0, 321.0, 400.0, 540.0]
    assert tails[..., 0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    onwards, tails = convolved(torch.tensor([[6.0]]), torch.tensor([[1.0, 10.0, 100.0]]), [1], tails[1:])
    assert onwards.tolist() == [[654.0]] and tails[..., 0].tolist() == [[5.0, 6.0]]


LINEAR = {"linear_attention_layers": [0, 2], "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_head_dim": 4}
LINEAR |= {"linear_value_head_dim": 4, "linear_conv_size": 4}


def test_layouts_and_modes_that_are_refused():
    architecture = Architecture(vocab_size=61, **LINEAR)
    with pytest.raises(ConfigError, match="parallel.cp=2: the model's delta nets hand a state on from token to token; allowed: 1"):
        check_together(architecture, ModelConfig(), ParallelConfig(cp=2))
    with pytest.raises(ConfigError, match="parallel.tp=4: does not divide the model's linear_key_heads=2; allowed: 1, 2$"):
        check_divisible(architecture, ParallelConfig(tp=4))
    with pytest.raises(ConfigError, match="batch_invariant=true: gated delta nets .* has no invariant form"):
        check_together(architecture, ModelConfig(batch_invariant=True), ParallelConfig())


def test_the_first_layers_alone():
    assert Architecture(**LINEAR).with_layers(2).linear_attention_layers == [0]
    assert Architecture(**LINEAR | {"linear_attention_layers": [2]}).with_layers(2).linear_key_heads == 0
