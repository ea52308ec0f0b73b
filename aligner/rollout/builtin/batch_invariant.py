"""The decoder of the batch-invariant mode: bit for bit the hidden states and logits of the policy's modules under `model.batch_invariant`,
for any batch, prefill chunks, page tables and number of ranks.

It computes with `aligner.parallel.exact`, as the modules of `aligner.models.modules.batch_invariant` do, in their order of operations.
Always in torch, without kernels of another arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.models.config import Architecture, Normalization
from aligner.models.modules.batch_invariant import ACTIVATIONS
from aligner.models.training.tracing import Operation
from aligner.parallel import exact
from aligner.rollout.builtin.attention import (
    DecodeBatch,
    DecodePlan,
    PagedKV,
    PrefillChunk,
    PrefillPlan,
    Together,
    plan_decode,
    plan_prefill,
)
from aligner.rollout.builtin.decode import Decoder, Shards
from aligner.rollout.builtin.weights import Affine, FeedForward, LayerWeights, ModelWeights
from aligner.rollout.config import Kernels


class BatchInvariantDecoder(Decoder):
    """`Decoder` for dense models, on exact arithmetic.

    Weights are rounded once after each prefill pass and each refit, for the decode steps that follow.
    """

    add_up = staticmethod(exact.weight_totals)

    def __init__(self, weights: ModelWeights, architecture: Architecture, shards: Shards, **options: Any) -> None:
        super().__init__(weights, architecture, shards, **(options | {"kernels": Kernels.torch, "cuda_graphs": False}))
        self.scale = 1.0 / math.sqrt(architecture.head_dim)
        self.exact_norm = _norm(architecture)
        self.exact_activation = ACTIVATIONS[architecture.activation]
        self._rounded: dict[tuple, exact.Rounded] = {}

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        self._rounded.clear()
        plan = plan_prefill(chunks, cache.page_size, self.weights.embedding.device)
        return self._last(self._layers(plan.tokens, plan, cache)[plan.wanted])

    @torch.no_grad()
    def decode(self, batch: DecodeBatch, cache: PagedKV) -> Tensor:
        return self._last(self._layers(batch.tokens, plan_decode(batch, cache.page_size), cache))

    def refitted(self) -> None:
        """The weights hold other numbers now: forget the old ones."""
        self._rounded.clear()

    def _last(self, x: Tensor) -> Tensor:
        """Logits of residual streams [N, H]."""
        depth = len(self.weights.layers)
        norm = self.weights.final_norm
        normed = x if norm is None else self._note(Operation.final_norm, depth, self.exact_norm(x, norm))
        return self._note(Operation.logits, depth, self._vocabulary_logits(normed))

    def _layers(self, tokens: Tensor, plan: PrefillPlan | DecodePlan, cache: PagedKV) -> Tensor:
        """Flat tokens [N] through all layers: [N, H]."""
        x = self._note(Operation.embedding, -1, self._embed(tokens, plan.positions))
        rotary = self.rotary.at(plan.positions)[0]  # all layers are alike
        for number, layer in enumerate(self.weights.layers):
            normed = self._note(Operation.input_norm, number, self.exact_norm(x, layer.input_norm))
            mixed = self._queries_keys_values(layer, number, normed, rotary)
            attended = self._note(Operation.attention, number, self._look_back(mixed, plan, cache, number))
            x = x + self._note(Operation.projection, number, self._sum_of_parts(attended, layer.attention_out))
            self._note(Operation.attention_residual, number, x)
            normed = self._note(Operation.mlp_norm, number, self.exact_norm(x, layer.mlp_norm))
            inner = self._note(Operation.activation, number, self._inner(normed, layer.experts[0]))
            x = x + self._note(Operation.mlp, number, self._sum_of_parts(inner, layer.experts[0].down))
            self._note(Operation.residual, number, x)
        return x

    def _queries_keys_values(self, layer: LayerWeights, number: int, x: Tensor, rotary: tuple | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, groups, queries per group, D], keys and values [N, groups, D], rotated."""
        mixed = self._note(Operation.qkv, number, self._linear(x, layer.qkv)).view(x.shape[0], self.groups, self.queries + 2, self.head_dim)
        q, k, v = mixed[..., :-2, :], mixed[..., -2:-1, :], mixed[..., -1, :]
        if layer.q_norm is not None:
            q = self._note(Operation.q_norm, number, self.exact_norm(q, layer.q_norm))
            k = self._note(Operation.k_norm, number, self.exact_norm(k, layer.k_norm))
        if rotary is not None:
            q, k = exact.rotate(q, *rotary), exact.rotate(k, *rotary)
        return self._note(Operation.queries, number, q), self._note(Operation.keys, number, k[..., 0, :]), v

    def _look_back(self, mixed: tuple[Tensor, Tensor, Tensor], plan: PrefillPlan | DecodePlan, cache: PagedKV, number: int) -> Tensor:
        """Put keys and values into the cache and attend: [N, heads * D]."""
        queries, keys, values = mixed
        slots = cache.slots(number)
        for slot, own in zip(slots, (keys, values), strict=True):
            slot.index_copy_(0, plan.slots, own)
        if isinstance(plan, DecodePlan):
            k, v = (tensor[number][plan.pages].flatten(1, 2).transpose(1, 2) for tensor in (cache.keys, cache.values))
            return exact.attention(queries, k, v, plan.visible, self.scale).flatten(1)
        out = torch.empty_like(queries)
        for part in plan.parts:
            if isinstance(part, Together):
                out[part.tokens] = self._causal(queries[part.rows], keys[part.rows], values[part.rows])[part.kept]
            else:
                past_and_own = (slot[part.slots][None] for slot in slots)
                out[part.first : part.last] = self._causal(queries[None, part.first : part.last], *past_and_own)[0]
        return out.flatten(1)

    def _causal(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[B, S, groups, queries per group, D], the last S of keys and values [B, T, groups, D]."""
        q = queries.flatten(2, 3).transpose(1, 2)
        out = exact.causal_attention(q, keys.transpose(1, 2), values.transpose(1, 2), self.scale)
        return out.transpose(1, 2).view_as(queries)

    def _inner(self, x: Tensor, weights: FeedForward) -> Tensor:
        inner = self._linear(x, weights.up)
        if not self.architecture.gated_mlp:
            return self.exact_activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.exact_activation(gate) * up

    def _linear(self, x: Tensor, weights: Affine) -> Tensor:
        """A matrix whose outputs are split over the ranks."""
        out = exact.product(x, self._rounded_weight(weights.weight, None))
        return out if weights.bias is None else out + weights.bias

    def _sum_of_parts(self, x: Tensor, weights: Affine) -> Tensor:
        """A matrix whose inputs are split over the ranks."""
        group = self.shards.group if self.shards.count > 1 else None
        out = exact.product(x, self._rounded_weight(weights.weight, group), group)
        return out if weights.bias is None else out + weights.bias

    def _vocabulary_logits(self, hidden: Tensor) -> Tensor:
        vocabulary = self.architecture.vocab_size
        own = exact.product(hidden, self._rounded_weight(self.weights.output[:vocabulary], None)).float()
        return self._gather(own)

    def _rounded_weight(self, weight: Tensor, group: torch.distributed.ProcessGroup | None) -> exact.Rounded:
        key = (weight.data_ptr(), weight.shape)
        if key not in self._rounded:
            self._rounded[key] = exact.round_weight(weight, group)
        return self._rounded[key]


def _norm(architecture: Architecture) -> Callable[[Tensor, Affine], Tensor]:
    """The architecture's norm over the last dimension."""
    eps = architecture.norm_eps
    if architecture.normalization == Normalization.rms_norm:
        return lambda x, affine: exact.rms_norm(x, affine.weight, eps)
    if architecture.normalization == Normalization.layer_norm:
        return lambda x, affine: exact.layer_norm(x, affine.weight, affine.bias, eps)
    return lambda x, affine: exact.layer_norm(x, affine.weight + 1.0, affine.bias, eps)
