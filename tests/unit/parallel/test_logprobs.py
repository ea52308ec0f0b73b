"""Log-probs and entropy of a linear layer's output, against torch in float64, by hand, and without a large tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.errors import ConfigError
from aligner.parallel.logprobs import Projection, linear_logprobs, linear_logprobs_of

N, H, V = 11, 5, 13


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def reference(hidden, weight, targets, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_by_hand():
    """Logits are hidden itself: [ln 1, ln 2, ln 5] gives 1/8, 2/8, 5/8; at temperature 1/2 the weights are squared: 1/30, 4/30, 25/30."""
    hidden = torch.tensor([[0.0, math.log(2), math.log(5)]] * 2)
    logprobs, entropy = linear_logprobs(hidden, torch.eye(3), torch.tensor([1, 2]))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(5 / 8)], abs=1e-6)
    by_hand = -(1 / 8 * math.log(1 / 8) + 1 / 4 * math.log(1 / 4) + 5 / 8 * math.log(5 / 8))
    assert entropy.tolist() == pytest.approx([by_hand, by_hand], abs=1e-6)
    logprobs, _ = linear_logprobs(hidden, torch.eye(3), torch.tensor([0, 1]), Projection(temperature=0.5))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 30), math.log(4 / 30)], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk_size", [1, 4, N, 100])
def test_values_and_gradients_equal_autograd(chunk_size, temperature):
    hidden, weight, targets = inputs(torch.float32)
    reference_hidden, reference_weight, _ = inputs(torch.float32)
    generator = torch.Generator().manual_seed(6)
    of_logprobs, of_entropy = (torch.randn(N, generator=generator) for _ in range(2))
    expected = reference(reference_hidden, reference_weight, targets, temperature)
    ((expected[0] * of_logprobs).sum() + (expected[1] * of_entropy).sum()).backward()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, Projection(temperature=temperature, chunk_size=chunk_size))
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1].float(), rtol=1e-5, atol=1e-5)
    ((logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()).backward()
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, reference_weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which):
    hidden, weight, targets = inputs(torch.float32)
    reference_hidden, reference_weight, _ = inputs(torch.float32)
    reference(reference_hidden, reference_weight, targets)[which].sum().backward()
    linear_logprobs(hidden, weight, targets, Projection(chunk_size=3))[which].sum().backward()
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, reference_weight.grad, rtol=1e-4, atol=1e-5)


def test_vocab_start_shifts_the_targets():
    hidden, weight, targets = inputs(torch.float32)
    expected = linear_logprobs(hidden, weight, targets)
    shifted = linear_logprobs(hidden, weight, targets + 100, Projection(vocab_start=100))
    assert torch.equal(shifted[0], expected[0]) and torch.equal(shifted[1], expected[1])


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, torch.eye(3), torch.tensor([1]))
    assert logprobs.item() == -2e4 and entropy.item() == 0.0
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_no_token_at_all():
    hidden, weight, _ = inputs(torch.float32)
    logprobs, entropy = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any() and not hidden.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ConfigError, match=f"temperature={temperature}"):
        linear_logprobs(*inputs(torch.float32), Projection(temperature=temperature))


class _LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    tokens, vocab, chunk = 512, 300, 32
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    with _LargestTensor() as seen:
        logprobs, entropy = linear_logprobs(hidden, weight, torch.arange(tokens) % vocab, Projection(chunk_size=chunk))
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.elements == chunk * vocab  # of tokens * vocab = 16 times as many
    assert hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize("shape", [{"scale": 0.3}, {"softcap": 1.5}, {"scale": 1.7, "softcap": 2.0}])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_scaled_and_capped_logits(chunk_size, shape):
    """Gradients through cap * tanh(scale * logit / cap) / temperature, of log-probs and entropy, and of several targets."""
    hidden, weight, targets = inputs(torch.float32)
    reference_hidden, reference_weight, _ = inputs(torch.float32)
    generator = torch.Generator().manual_seed(6)
    factors = [torch.randn(N, generator=generator) for _ in range(3)]
    others = torch.stack([targets, (targets + 3) % V], dim=1)
    logits = reference_hidden @ reference_weight.t() * shape.get("scale", 1.0)
    cap = shape.get("softcap", 0.0)
    log_p = torch.log_softmax((cap * torch.tanh(logits / cap) if cap else logits) / 0.7, dim=-1)
    entropy, named = -(log_p.exp() * log_p).sum(-1), log_p.gather(1, others)
    ((named[:, 0] * factors[0]).sum() + (entropy * factors[1]).sum() + (named[:, 1] * factors[2]).sum()).backward()
    projection = Projection(temperature=0.7, chunk_size=chunk_size, **shape)
    ours, our_entropy = linear_logprobs(hidden, weight, targets, projection)
    our_named = linear_logprobs_of(hidden, weight, others, projection)
    torch.testing.assert_close(torch.stack([ours, our_named[:, 1], our_entropy]), torch.stack([named[:, 0], named[:, 1], entropy]))
    ((ours * factors[0]).sum() + (our_entropy * factors[1]).sum() + (our_named[:, 1] * factors[2]).sum()).backward()
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, reference_weight.grad, rtol=1e-4, atol=1e-5)
