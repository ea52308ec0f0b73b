"""The random numbers against SplitMix64's published ones, the draws against the softmax, and the kept sets by hand."""

from __future__ import annotations

import pytest
import torch

from aligner.rollout.builtin.sampling import invert, truncated, uniforms

MASK = (1 << 64) - 1


def splitmix64(seed: int, draws: int) -> list[int]:
    """Steele, Lea and Flood (2014), in Python's integers."""
    outputs = []
    for _ in range(draws):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


@pytest.mark.parametrize("seed", [0, 1, 1234567, -1, 2**63 - 1, -(2**63)])
def test_uniforms_are_splitmix64(seed):
    assert splitmix64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # as published
    expected = [(x >> 11) * 2.0**-53 for x in splitmix64(seed & MASK, 50)]
    assert uniforms(torch.tensor(seed), torch.arange(50)).tolist() == expected
    single = [uniforms(torch.tensor([seed]), torch.tensor(position)).item() for position in (0, 49)]
    assert single == [expected[0], expected[49]]


def test_uniforms_are_uniform_over_seeds_and_positions():
    """Neighbouring seeds, as a run uses them. 64 bins of 4,096 each: chi-square with 63 degrees of freedom exceeds 120 once in 60,000."""
    x = uniforms(torch.arange(2048)[:, None], torch.arange(128)[None, :])
    assert x.dtype == torch.float64 and x.min() >= 0 and x.max() < 1
    counts = torch.histc(x.flatten(), bins=64, min=0, max=1)
    assert ((counts - 4096) ** 2 / 4096).sum() < 120
    rows = x - 0.5
    for shifted in (rows[1:] * rows[:-1], rows[:, 1:] * rows[:, :-1]):  # neighbours in seed, in position: uncorrelated
        assert abs(shifted.mean().item() * 12) < 0.01  # standard error 0.002


def grid(num: int) -> torch.Tensor:
    """Evenly spread uniforms: empirical frequencies then equal the probabilities within 1 / num per bin edge."""
    return (torch.arange(num, dtype=torch.float64) + 0.5) / num


def drawn(logits: torch.Tensor, uniform: torch.Tensor, *, temperature: float = 1.0, **kept) -> torch.Tensor:
    z = (logits / temperature).expand(len(uniform), -1)
    return invert(truncated(z, (z - z.amax(dim=-1, keepdim=True)).exp(), **kept), uniform)


@pytest.mark.parametrize("vocab", [4, 128, 129, 300])
def test_no_uniform_lands_on_a_token_of_probability_zero(vocab):
    """0, the largest uniform below 1, and uniforms at every edge between two tokens; first, last and most other tokens are impossible."""
    generator = torch.Generator().manual_seed(vocab)
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    for _ in range(200):
        logits = 3 * torch.randn(vocab, generator=generator)
        logits[torch.rand(vocab, generator=generator) < 0.7] = -torch.inf
        logits[0] = logits[-1] = -torch.inf
        logits[1] = logits[vocab // 2] = 0.0
        edges = torch.softmax(logits.double(), dim=0).cumsum(dim=0).clamp(0, largest)
        steps = [torch.nextafter(edges, torch.zeros_like(edges)), edges, torch.nextafter(edges, torch.ones_like(edges))]
        uniform = torch.cat([*steps, largest[None], torch.zeros(1, dtype=torch.float64)]).clamp(0, largest)
        assert torch.isfinite(logits[drawn(logits, uniform)]).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.7}])
def test_draws_from_a_large_vocabulary_invert_the_cumulative_distribution(options):
    """1,000 tokens, in plain float64: the token at which the cumulative probability of the kept ones passes the uniform."""
    logits = 2 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    probabilities = torch.softmax(logits.double(), dim=0)
    ordered, order = probabilities.sort(descending=True)
    kept = min(options.get("top_k", 1000), int((ordered.cumsum(0) < options.get("top_p", 1.0) - 1e-9).sum()) + 1)
    probabilities[order[kept:]] = 0
    probabilities /= probabilities.sum()
    uniform = grid(997)
    tokens = drawn(logits, uniform, **options)
    cumulative = probabilities.cumsum(0)
    assert (cumulative[tokens] > uniform - 1e-6).all() and (cumulative[tokens] - probabilities[tokens] < uniform + 1e-6).all()
    assert (probabilities[tokens] > 0).all() and len(tokens.unique()) > 20
