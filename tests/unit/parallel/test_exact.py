"""Sums that do not depend on order, and functions that do not depend on place: the arithmetic of the batch-invariant mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aligner.parallel import exact
from aligner.parallel.logprobs import FAST, Projection, linear_logprobs

GENERATOR = 4


def noise(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + GENERATOR)) * spread


def test_rounding_is_to_bits_below_each_rows_largest():
    rounded = exact.round_rows(torch.tensor([[1.0, 0.3, -0.01], [80.0, -100.0, 0.0], [0.0, 0.0, 0.0]]), bits=5)
    # 1 < 2^1: steps of 2^-4, so 16, 0.3 * 16 = 4.8, -0.16; 100 < 2^7: steps of 4.
    assert rounded.numbers.tolist() == [[16, 5, 0], [20, -25, 0], [0, 0, 0]]
    assert rounded.unit[:2].tolist() == [[2.0**-4], [4.0]]
    assert exact.term_bits(512) == (22, 22) and exact.term_bits(1) == (27, 26) and sum(exact.term_bits(4097)) == 40


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_a_product_of_rows_is_the_rows_products_and_as_accurate_as_float32s(spread):
    x, weight = noise(70, 96, spread=spread), noise(53, 96)
    whole = exact.linear(x, weight)
    for start, stop in ((0, 1), (5, 7), (37, 70)):
        assert torch.equal(exact.linear(x[start:stop], weight), whole[start:stop])
    columns = torch.randperm(96, generator=torch.Generator().manual_seed(1))  # another order of the sums
    assert torch.equal(exact.linear(x[:, columns], weight[:, columns]), whole)
    right = (x.double() @ weight.double().t()).float()
    assert (whole - right).abs().max() < 2 * (x @ weight.t() - right).abs().max()


def test_sums_do_not_depend_on_their_order():
    x = noise(9, 1001).exp()
    flipped = x.flip(-1)
    assert torch.equal(exact.row_totals(x), exact.row_totals(flipped))
    torch.testing.assert_close(exact.row_totals(x)[:, 0], x.double().sum(-1), rtol=1e-12, atol=0)
    weights = x / x.amax(-1, keepdim=True)
    parts = [exact.weight_totals(part) for part in weights.split([1, 400, 600], dim=-1)]
    assert torch.equal(parts[2] + parts[0] + parts[1], exact.weight_totals(weights))
    torch.testing.assert_close(exact.weight_totals(weights), weights.double().sum(-1), rtol=1e-7, atol=0)


FUNCTIONS = {
    "silu": (exact.silu, F.silu),
    "gelu": (exact.gelu, F.gelu),
    "gelu_tanh": (exact.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    "squared_relu": (exact.squared_relu, lambda x: F.relu(x).square()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_torchs_and_the_same_at_every_place(name):
    ours, theirs = FUNCTIONS[name]
    x = noise(4099, spread=6).requires_grad_()
    out = ours(x)
    torch.testing.assert_close(out, theirs(x), rtol=1e-5, atol=1e-6)
    for part in (x[1:2], x[3:20], x[::3], x[5:1029]):
        assert torch.equal(ours(part), out[torch.isin(x, part)])
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_norms_are_torchs():
    x, weight, bias = noise(3, 5, 37, spread=3), noise(37), noise(1, 37)[0]
    torch.testing.assert_close(exact.rms_norm(x, weight, 1e-5), F.rms_norm(x, (37,), weight, 1e-5))
    torch.testing.assert_close(exact.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (37,), weight, bias, 1e-5))
    assert torch.equal(exact.rms_norm(x[1:2, 2:3], weight, 1e-5)[0, 0], exact.rms_norm(x, weight, 1e-5)[1, 2])


def test_attention_of_a_query_depends_on_what_it_sees_alone():
    """Over more keys than are summed at a time, with and without what comes later, by itself and with others, in a cache with rubbish."""
    length = exact.KEYS_AT_A_TIME + 150
    q, k, v = noise(1, 4, length, 8), noise(1, 2, length, 8), noise(1, 2, length + 1, 8)[:, :, 1:]
    whole = exact.causal_attention(q, k, v, 0.4)
    torch.testing.assert_close(whole, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True))
    for size in (1, 130, exact.KEYS_AT_A_TIME + 3):
        assert torch.equal(exact.causal_attention(q[:, :, :size], k[:, :, :size], v[:, :, :size], 0.4), whole[:, :, :size])
        last = exact.causal_attention(q[:, :, size - 1 : size], k[:, :, :size], v[:, :, :size], 0.4)
        assert torch.equal(last, whole[:, :, size - 1 : size])
        cached = (F.pad(x[:, :, :size], (0, 0, 0, 1200), value=7.0) for x in (k, v))
        visible = torch.arange(size + 1200) < size
        one = exact.attention(q[:, :, size - 1].view(1, 2, 2, 8), *cached, visible, 0.4)
        assert torch.equal(one.view(1, 4, 8), whole[:, :, size - 1])


def test_logprobs_are_the_ordinary_ones_for_any_chunk_of_tokens():
    hidden, weight, targets = noise(23, 16), noise(301, 16), torch.arange(23) * 13
    expected = linear_logprobs(hidden, weight, targets, Projection(temperature=0.7, arithmetic=FAST))
    whole = linear_logprobs(hidden, weight, targets, Projection(temperature=0.7, arithmetic=exact.EXACT))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
    for chunk in (1, 5, 22):
        assert torch.equal(
            linear_logprobs(hidden, weight, targets, Projection(temperature=0.7, chunk_size=chunk, arithmetic=exact.EXACT))[0], whole[0]
        )
    one = linear_logprobs(hidden[7:8], weight, targets[7:8], Projection(temperature=0.7, arithmetic=exact.EXACT))
    assert torch.equal(one[0], whole[0][7:8])


def test_a_linear_layers_gradient_is_the_ordinary_one():
    x, weight, grad = noise(2, 3, 8).requires_grad_(), noise(5, 8).requires_grad_(), noise(2, 3, 5)
    ours = torch.autograd.grad(exact.linear_with_gradient(x, weight), (x, weight), grad)
    torch.testing.assert_close(ours, torch.autograd.grad(F.linear(x, weight), (x, weight), grad))


def test_this_machine_computes_what_the_mode_builds_on(monkeypatch):
    from aligner.errors import ConfigError

    exact.check_arithmetic(torch.device("cpu"))
    monkeypatch.setattr(torch, "erf", lambda x: torch.special.erf(x) * (1 + 1e-6 * (x.shape[0] < 5)))
    with pytest.raises(ConfigError, match="torch.erf on this cpu depends on the place in the tensor"):
        exact.check_arithmetic(torch.device("cpu"))
