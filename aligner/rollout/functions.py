"""Norms, non-linearities and the first half of a feed-forward layer, in plain torch: what the decoder's layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Activation, Architecture, Normalization
from aligner.rollout.weights import Affine, FeedForward


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.squared_relu: _squared_relu,
    Activation.relu: F.relu,
}


def expand(x: Tensor, weights: FeedForward, activation: Callable[[Tensor], Tensor], *, gated: bool) -> Tensor:
    """This rank's share of the inner activations, [..., F / tp]: activation(gate x) * (up x), or activation(up x)."""
    inner = F.linear(x, weights.up.weight, weights.up.bias)
    if not gated:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up


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
