"""Weights of files in few bits, as the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Microscaling FP4 (2310.10537): uint8 `blocks` [..., rows, groups, 16] of two numbers each, the low four bits first, and `scales`
    [..., rows, groups], exponents of 2 plus 127, -> bfloat16 [..., groups * 32, rows], in which all of them are exact."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 0x0F).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - 127)
    return scaled.flatten(-2).transpose(-1, -2)
