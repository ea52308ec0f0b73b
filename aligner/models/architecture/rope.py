"""Frequencies of the rotary embedding, plain or scaled for longer contexts: one for each pair of rotated dimensions, float32.

Linear (Chen et al. 2023, 2306.15595), by parts as in Llama 3.1, YaRN (Peng et al. 2023, 2309.00071) and LongRoPE (Ding et al. 2024,
2402.13753); the last two have a factor on cosines and sines (`Architecture.rope_attention_factor`). Dynamic scaling begins beyond
`max_position_embeddings`, where no sequence is.

Which of LongRoPE's two sets of divisors is taken depends on the context length of the run alone, so that a token's log-prob depends on
nothing but what is before it. transformers takes the long one where the longest row of a batch has more tokens than `rope_original_length`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from aligner.models.config import NOT_SCALED, Architecture, SeeingArchitecture


def frequencies(architecture: Architecture, device: torch.device | None = None, *, context: int = 0) -> Tensor:
    """Angle per position of each pair of rotated dimensions, in a run that allows `context` tokens (0: the model's most)."""
    size = architecture.rotated
    plain = 1.0 / architecture.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    if architecture.rope_linear_factor:
        return plain / architecture.rope_linear_factor
    if architecture.rope_llama3_factor:
        return _by_wavelength(plain, architecture)
    if architecture.rope_yarn_factor:
        return _yarn(plain, size, architecture)
    if architecture.rope_long_factors:
        factors = architecture.rope_long_factors if is_long(architecture, context) else architecture.rope_short_factors
        return plain / torch.tensor(factors, dtype=torch.float32, device=device)
    return plain


def is_long(architecture: Architecture, context: int) -> bool:
    """Whether a run whose sequences may have `context` tokens (0: the model's longest) has LongRoPE's long factors."""
    return (context or architecture.max_position_embeddings) > architecture.rope_original_length


def choice(architecture: Architecture, context: int) -> str:
    """A line for the log: which of LongRoPE's sets of factors the run has, and why."""
    kind, place = ("long", "beyond") if is_long(architecture, context) else ("short", "within")
    length, original = context or architecture.max_position_embeddings, architecture.rope_original_length
    return (
        f"rotary embedding: LongRoPE's {kind} factors throughout (model.seq_length allows {length} tokens, {place} the {original} before)"
    )


UNSCALED = NOT_SCALED | {"rope_attention_factor": 1.0}


def local(architecture: Architecture) -> Architecture:
    """The same with the base of the layers that have a window, which nothing scales."""
    return replace(architecture, rope_theta=architecture.rope_local_theta, **UNSCALED)


def is_scaled(architecture: Architecture) -> bool:
    own = ("rope_linear_factor", "rope_llama3_factor", "rope_yarn_factor", "rope_long_factors")
    return any(getattr(architecture, name) for name in own)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """0.1 scale ln(factor) + 1, equation 22 of the paper; 1 where nothing is stretched."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """sqrt(1 + ln(factor) / ln(original length)), as in the paper; 1 where nothing is stretched, 0 (none) for an original length of 1."""
    if original_length == 1:
        return 0.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0


def angles_of_axes(positions: Tensor, frequencies: Tensor, architecture: SeeingArchitecture) -> Tensor:
    """Angles [..., D] of positions [3, ...] in time, height and width, each of which turns its own frequencies (Qwen2-VL, 2409.12191)."""
    angles, sections = positions[..., None].float() * frequencies, architecture.rope_sections
    if architecture.rope_mixed:
        half = angles[0].clone()
        for axis in (1, 2):
            columns = slice(axis, 3 * sections[axis], 3)
            half[..., columns] = angles[axis, ..., columns]
    else:
        half = torch.cat([part[axis] for axis, part in enumerate(angles.split(sections, dim=-1))], dim=-1)
    return torch.cat([half, half], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head, as many as the tables have; of the sines those of the first half are negative."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)
    first, rest = x[..., :rotated], x[..., rotated:]
    return torch.cat([torch.addcmul(first * cos, first.roll(rotated // 2, -1), sin), rest], dim=-1)


def neighbours_apart(x: Tensor, rotated: int) -> Tensor:
    """[..., D] whose first `rotated` dimensions are those of even number, then those of odd number."""
    pairs = x[..., :rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return pairs if rotated == x.shape[-1] else torch.cat([pairs, x[..., rotated:]], dim=-1)


def factor_of_scores(architecture: Architecture) -> float:
    """The factor on cosines and sines where its square can be one on scores; else, of heads that are rotated in part, 1."""
    return architecture.rope_attention_factor if architecture.rotary_fraction == 1 else 1.0


def factor(architecture: Architecture, layer: int) -> float:
    """The same of a layer, counted from 0."""
    local = architecture.rope_local_theta and architecture.window_of(layer)
    return 1.0 if local else factor_of_scores(architecture)


def temperature(architecture: Architecture, positions: Tensor) -> Tensor:
    """What queries at these positions are multiplied by in layers without rotary positions, float32 of the same shape: it grows with the
    logarithm of how many keys there are (Nakanishi 2025, 2501.19399)."""
    reached = torch.floor((positions.float() + 1) / architecture.attention_temperature_length)
    return 1 + architecture.attention_temperature * torch.log1p(reached)


def score_scale(architecture: Architecture) -> float:
    """What scores are multiplied by, without the factor on cosines and sines."""
    stretched = yarn_attention_factor(architecture.rope_yarn_factor, architecture.rope_score_scale)
    return (architecture.attention_scale or architecture.head_dim**-0.5) * stretched**2


def _by_wavelength(plain: Tensor, architecture: Architecture) -> Tensor:
    factor, low, high = architecture.rope_llama3_factor, architecture.rope_low_freq_factor, architecture.rope_high_freq_factor
    turns = architecture.rope_original_length / (2 * math.pi / plain)
    share = ((turns - low) / ((high - low) or 1e-9)).clamp(0, 1)  # a step if both are equal
    return (1 - share) * plain / factor + share * plain


def _yarn(plain: Tensor, size: int, architecture: Architecture) -> Tensor:
    """Dimensions that turn more than `beta_fast` times in the original length unchanged, fewer than `beta_slow` divided by the factor."""

    def dimension(turns: float) -> float:
        length = architecture.rope_original_length
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(architecture.rope_theta))

    first, last = dimension(architecture.rope_beta_fast), dimension(architecture.rope_beta_slow)
    if architecture.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    places = torch.arange(size // 2, dtype=torch.float32, device=plain.device)
    stretched = ((places - first) / ((last - first) or 0.001)).clamp(0, 1)
    return plain / architecture.rope_yarn_factor * stretched + plain * (1 - stretched)
