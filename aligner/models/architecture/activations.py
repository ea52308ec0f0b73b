"""The non-linearities of feed-forward layers, the trainer's and the engine's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Activation, Architecture


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: _gelu_tanh,
    Activation.squared_relu: _squared_relu,
    Activation.relu: F.relu,
    Activation.quick_gelu: _quick_gelu,
}


def activation_of(architecture: Architecture) -> Callable[[Tensor], Tensor]:
    """What comes between a feed-forward layer's two matrices: [..., inner] of [gate x; up x] side by side, or of up x."""
    activation = ACTIVATIONS[architecture.activation]
    if not architecture.gated_mlp:
        return activation
    return partial(_gated, activation=activation, limit=architecture.glu_limit, offset=architecture.glu_offset)


def _gated(inner: Tensor, *, activation: Callable[[Tensor], Tensor], limit: float, offset: float) -> Tensor:
    """activation(gate x) * (up x + offset), both cut at the limit if there is one."""
    gate, up = inner.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + offset if offset else up)
