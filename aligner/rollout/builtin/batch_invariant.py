"""The decoder of the batch-invariant mode: bit for bit the hidden states and logits of the policy's modules under `model.batch_invariant`,
for any batch, prefill chunks, page tables and number of ranks.

It computes with `aligner.parallel.exact`, as `aligner.models.modules.batch_invariant` does, in the same order of operations, and in torch
only: other kernels have another arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.models.config import Architecture, Normalization
from aligner.models.modules.batch_invariant import ACTIVATIONS
from aligner.parallel import exact
from aligner.rollout.builtin.attention import DecodePlan, GatheredAttention, PagedKV, PrefillChunk, gathered
from aligner.rollout.builtin.decode import Decoder, Shards
from aligner.rollout.builtin.weights import Affine, ModelWeights
from aligner.rollout.config import Kernels


class ExactAttention(GatheredAttention):
    """Attention whose sums are exact."""

    def __init__(self, page_size: int, scale: float) -> None:
        super().__init__(page_size)
        self._scale = scale

    def fresh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = queries.flatten(2, 3).transpose(1, 2)
        out = exact.causal_attention(q, keys.transpose(1, 2), values.transpose(1, 2), self._scale)
        return out.transpose(1, 2).view_as(queries)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        return exact.attention(queries, *gathered(cache, layer, plan), plan.visible, self._scale)


class BatchInvariantDecoder(Decoder):
    """`Decoder` for dense models, on exact arithmetic.

    Weights are rounded once after each prefill pass and each refit, for the decode steps that follow.
    """

    add_up = staticmethod(exact.weight_totals)
    _rotate = staticmethod(exact.rotate)

    def __init__(self, weights: ModelWeights, architecture: Architecture, shards: Shards, **options: Any) -> None:
        super().__init__(weights, architecture, shards, **(options | {"kernels": Kernels.torch, "cuda_graphs": False}))
        self.norm = self._norm_of_heads = _norm(architecture)
        self.activate = _activation(architecture)
        self._attentions = [ExactAttention(self.page_size, 1.0 / math.sqrt(architecture.head_dim))] * len(weights.layers)
        self._rounded: dict[tuple, exact.Rounded] = {}

    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        self._rounded.clear()
        return super().prefill(chunks, cache)

    def refitted(self) -> None:
        self._rounded.clear()

    def _linear(self, x: Tensor, weights: Affine) -> Tensor:
        out = exact.product(x, self._rounded_weight(weights.weight, None))
        return out if weights.bias is None else out + weights.bias

    def _project(self, x: Tensor, weights: Affine) -> Tensor:
        group = self.shards.group if self.shards.count > 1 else None
        out = exact.product(x, self._rounded_weight(weights.weight, group), group)
        return out if weights.bias is None else out + weights.bias

    def _logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        own = self._rounded_weight(self.weights.output[: self.architecture.vocab_size], None)
        return self._gather(exact.product(hidden, own).float())

    def _rounded_weight(self, weight: Tensor, group: torch.distributed.ProcessGroup | None) -> exact.Rounded:
        key = (weight.data_ptr(), weight.shape)
        if key not in self._rounded:
            self._rounded[key] = exact.round_weight(weight, group)
        return self._rounded[key]


def _activation(architecture: Architecture) -> Callable[[Tensor], Tensor]:
    function = ACTIVATIONS[architecture.activation]

    def gated(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return function(gate) * up

    return gated if architecture.gated_mlp else function


def _norm(architecture: Architecture) -> Callable[[Tensor, Affine], Tensor]:
    eps = architecture.norm_eps
    if architecture.normalization == Normalization.rms_norm:
        return lambda x, affine: exact.rms_norm(x, affine.weight, eps)
    if architecture.normalization == Normalization.layer_norm:
        return lambda x, affine: exact.layer_norm(x, affine.weight, affine.bias, eps)
    return lambda x, affine: exact.layer_norm(x, affine.weight + 1.0, affine.bias, eps)
