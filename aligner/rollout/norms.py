"""The norms of decode steps, over the last dimension, or of queries and keys by their heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture, Normalization
from aligner.rollout.weights import Affine

Norm = Callable[[Tensor, Affine], Tensor]


def norm_of(architecture: Architecture) -> Norm:
    """The architecture's norm over the last dimension."""
    eps, kind = architecture.norm_eps, architecture.normalization
    if kind is Normalization.rms_norm:
        return lambda x, weights: F.rms_norm(x, weights.weight.shape, weights.weight, eps)
    if kind is Normalization.rms_norm_1p:
        return lambda x, weights: F.rms_norm(x.float(), weights.weight.shape, weights.weight.float() + 1, eps).to(x.dtype)
    if kind is Normalization.layer_norm_1p:
        return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight + 1, weights.bias, eps)
    return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight, weights.bias, eps)


def norm_of_heads(architecture: Architecture, *, ranks: int, add_up: Callable[[Tensor], Tensor]) -> Norm:
    """The norm of this rank's queries, or keys, [N, groups, heads of each, D]; `add_up` sums over the `ranks` that share the heads."""
    eps = architecture.norm_eps

    def whole(x: Tensor, weights: Affine) -> Tensor:
        flat = x.flatten(1).float()
        squares = add_up(flat.square().sum(dim=-1, keepdim=True)) / (flat.shape[-1] * ranks)
        return ((flat * torch.rsqrt(squares + eps)).to(x.dtype) * weights.weight).view(x.shape)

    def by_head(x: Tensor, weights: Affine) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weights.weight.float().view(x.shape[1:])).to(x.dtype)

    if architecture.qk_norm_whole:
        return whole
    return by_head if architecture.qk_norm_by_head else norm_of(architecture)
