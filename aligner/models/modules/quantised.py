"""Weights of files in few bits, as the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Microscaling FP4 (2310.10537): uint8 `blocks` [..., rows, groups, 16] of two numbers each, the low four bits first, and `scales`
    [..., rows, groups], exponents of 2 plus 127, -> bfloat16 [..., groups * 32, rows], in which all of them are exact."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.stack([table[(blocks & 0x0F).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - 127)
    return scaled.flatten(-2).transpose(-1, -2)


def fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 by blocks (DeepSeek-V3, 2412.19437, 3.3): float8 `numbers` [rows, columns], a scale for each block of so many rows and columns,
    of which the last ones may have fewer, -> float32. Raises ValueError for another number of scales."""
    if scales.shape != tuple(-(-size // part) for size, part in zip(numbers.shape, block, strict=True)):
        raise ValueError(f"has {tuple(scales.shape)} scales for {tuple(numbers.shape)} in blocks of {block}")
    rows, columns = numbers.shape
    each = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return numbers.float() * each
