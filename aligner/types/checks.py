"""Dtypes and shapes of tensors in records."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensors(owner: object, tensors: dict[str, tuple[Tensor | None, torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ValueError where a tensor has not the dtype and shape stated (optional fields may be None)."""
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{type(owner).__name__}.{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
