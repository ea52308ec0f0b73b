"""Norms of an architecture in plain torch, as the decoder's layers compute them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture, Normalization
from aligner.rollout.weights import Affine


def norm_of(architecture: Architecture) -> Callable[[Tensor, Affine], Tensor]:
    """The architecture's norm over the last dimension."""
    eps, kind = architecture.norm_eps, architecture.normalization
    if kind is Normalization.rms_norm:
        return lambda x, weights: F.rms_norm(x, weights.weight.shape, weights.weight, eps)
    if kind is Normalization.rms_norm_1p:
        return lambda x, weights: F.rms_norm(x.float(), weights.weight.shape, weights.weight.float() + 1, eps).to(x.dtype)
    if kind is Normalization.layer_norm_1p:
        return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight + 1, weights.bias, eps)
    return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight, weights.bias, eps)
