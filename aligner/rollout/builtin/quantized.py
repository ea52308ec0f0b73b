"""Numbers of the built-in engine in 8 bits: weights (`rollout.precision`), keys and values (`rollout.cache_precision`).

A row of numbers is kept as codes of one byte each and a scale, its largest magnitude / the largest code (448 in FP8 e4m3, 127 in INT8).
A row is one output's weights, one token's input of a layer, or one head's key or value of a token: the weights by channel and dynamic
scales by token of compressed-tensors' FP8_DYNAMIC, and its W8A16 for INT8, whose inputs stay as they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.rollout.config import Precision

CODES = {Precision.fp8: torch.float8_e4m3fn, Precision.int8: torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def scales_of(rows: Tensor, codes: torch.dtype, *, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None) -> Tensor:
    """[..., 1] for rows [..., N]; 1 for a row of zeros. `group`: the ranks that have parts of the same rows."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scales = (largest / _LARGEST[codes]).to(dtype)
    return torch.where(scales > 0, scales, 1.0)


def encoded(rows: Tensor, scales: Tensor, codes: torch.dtype) -> Tensor:
    """The nearest codes; of two equally near ones the even one."""
    largest = _LARGEST[codes]
    ratios = (rows.float() / scales.float()).clamp_(-largest, largest)
    return (ratios.round_() if codes == torch.int8 else ratios).to(codes)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers, in the dtype of their scales."""
    return codes.to(scales.dtype) * scales
