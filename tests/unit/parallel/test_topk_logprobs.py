"""Log-probs of several tokens per position, and the likeliest tokens, against torch and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.errors import ConfigError
from aligner.parallel.logprobs import Projection, linear_logprobs, linear_logprobs_of, linear_topk

N, H, V = 11, 5, 13
LOGITS = torch.tensor([[0.0, math.log(2), math.log(5)]] * 2)  # probabilities 1/8, 2/8, 5/8


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(N, H, generator=generator).requires_grad_(), torch.randn(V, H, generator=generator).requires_grad_()


def test_by_hand() -> None:
    logprobs = linear_logprobs_of(LOGITS, torch.eye(3), torch.tensor([[2, 0], [1, 1]]))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[5 / 8, 1 / 8], [2 / 8, 2 / 8]]))
    sharper = linear_logprobs_of(LOGITS, torch.eye(3), torch.tensor([[2], [0]]), Projection(temperature=0.5))
    torch.testing.assert_close(sharper.exp(), torch.tensor([[25 / 30], [1 / 30]]))
    tokens, logprobs = linear_topk(LOGITS, torch.eye(3), 2, below=3)
    assert tokens.tolist() == [[2, 1], [2, 1]]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[5 / 8, 2 / 8]] * 2))
    tokens, logprobs = linear_topk(LOGITS, torch.eye(3), 2, below=2)  # the third counts in the normaliser alone
    assert tokens.tolist() == [[1, 0], [1, 0]]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[2 / 8, 1 / 8]] * 2))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_values_and_gradients_equal_autograd(chunk_size: int, temperature: float) -> None:
    """The first target of some rows is one of the others too."""
    (hidden, weight), (other_hidden, other_weight) = inputs(), inputs()
    generator = torch.Generator().manual_seed(6)
    targets = torch.stack([torch.randperm(V, generator=generator)[:4] for _ in range(N)])
    targets = torch.cat([targets[:, 2:3], targets], dim=1)
    slopes = torch.randn(targets.shape, generator=generator)
    expected = torch.log_softmax(other_hidden @ other_weight.t() / temperature, dim=-1).gather(1, targets)
    (expected * slopes).sum().backward()
    found = linear_logprobs_of(hidden, weight, targets, Projection(temperature=temperature, chunk_size=chunk_size))
    (found * slopes).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=1e-4, atol=1e-5)
    one, _ = linear_logprobs(hidden, weight, targets[:, 0], Projection(temperature=temperature, chunk_size=chunk_size))
    assert torch.equal(found[:, 0], one)  # the same bits, whichever function is asked


def test_the_likeliest() -> None:
    hidden, weight = inputs()
    expected = torch.log_softmax(hidden @ weight.t(), dim=-1).topk(6, dim=1)
    tokens, logprobs = linear_topk(hidden, weight, 6, Projection(chunk_size=3), below=V)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, rtol=1e-5, atol=1e-5)
    assert not logprobs.requires_grad
    everything = linear_topk(hidden, weight, V, below=V)[1]
    torch.testing.assert_close(everything.exp().sum(dim=1), torch.ones(N))


def test_no_position_at_all() -> None:
    hidden, weight = inputs()
    none = linear_logprobs_of(hidden[:0], weight, torch.zeros(0, 3, dtype=torch.int64))
    none.sum().backward()
    assert none.shape == (0, 3) and not weight.grad.any()
    assert [part.shape for part in linear_topk(hidden[:0], weight, 2, below=V)] == [(0, 2), (0, 2)]


def test_refusals() -> None:
    hidden, weight = inputs()
    for k in (0, V + 1):
        with pytest.raises(ConfigError, match=f"top_k={k}: must be at least 1 and at most the 13 words"):
            linear_topk(hidden, weight, k, below=V + 5)
    with pytest.raises(ConfigError, match="temperature=0.0"):
        linear_logprobs_of(hidden, weight, torch.zeros(N, 1, dtype=torch.int64), Projection(temperature=0.0))
