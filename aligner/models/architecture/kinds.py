"""What kinds of parts models have, by the names that configs give them."""

from __future__ import annotations

from enum import Enum


class Activation(str, Enum):
    """The non-linearity of the feed-forward layers; `gelu_tanh` is HF's `gelu_new` and `gelu_pytorch_tanh`, `squared_relu` its `relu2`,
    `quick_gelu` x * sigmoid(1.702 x)."""

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    squared_relu = "squared_relu"
    relu = "relu"
    quick_gelu = "quick_gelu"


class Normalization(str, Enum):
    """The norm of every layer; stored weights of `..._1p` are around 0 (the layer multiplies by 1 + weight)."""

    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    layer_norm_1p = "layer_norm_1p"
    rms_norm_1p = "rms_norm_1p"
    layer_norm_no_bias = "layer_norm_no_bias"

    @property
    def has_bias(self) -> bool:
        """Whether something is added to what is normalised."""
        return self in (Normalization.layer_norm, Normalization.layer_norm_1p)


class PositionEmbedding(str, Enum):
    """Rotary, or a learned table of `max_position_embeddings` rows that is added to the token embeddings."""

    rope = "rope"
    learned = "learned"


class ParallelResidual(str, Enum):
    """Whether the feed-forward layer reads what attention reads, and both are added to it; through a norm of its own, or attention's."""

    none = "none"
    own_norm = "own_norm"
    shared_norm = "shared_norm"
