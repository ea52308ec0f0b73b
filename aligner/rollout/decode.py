"""Incremental decoding: the arithmetic of the policy's Megatron-Core layers without their training machinery.

A decode step through the training modules takes several times as long on small batches, nearly all of it in Python; the tests hold this
pass equal to the modules' forward. It computes with `ModelWeights`, which may be the training parameters themselves.

Sequences are aligned on the right: all rows write the same cache slot in a step, and rows with shorter prompts hide their first slots.
Tensor parallelism: each rank holds its heads, its share of the MLP (of every expert) and of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture, Normalization
from aligner.rollout.feed_forward import ACTIVATIONS, expand, mix, route
from aligner.rollout.weights import Affine, FeedForward, LayerWeights, ModelWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Which share of the model this rank decodes with: `group` is None where it has all of it."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None


class KVCache:
    """Keys and values of every layer, [layers, B, groups, T, D] each, and which slots of a row hold its tokens."""

    def __init__(self, shape: tuple[int, int, int, int, int], *, dtype: torch.dtype, device: torch.device, padding: Tensor) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.padding = padding  # int64 [B]: number of hidden slots at the start of each row
        self.visible = self._visible()

    def _visible(self) -> Tensor | None:
        if not int(self.padding.max()):
            return None
        return torch.arange(self.keys.shape[3], device=self.padding.device) >= self.padding[:, None]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows only."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.padding = self.padding[rows]
        self.visible = self._visible()


class Decoder:
    """A language model's forward pass over a KV cache. Collective over the group of `shards`.

    `frequencies` are the rotary embedding's, one for each pair of rotated dimensions; None where positions are learned.
    """

    def __init__(
        self, weights: ModelWeights, architecture: Architecture, shards: Shards, *, max_sequence_length: int, frequencies: Tensor | None
    ) -> None:
        self.weights = weights
        self.architecture = architecture
        self.shards = shards
        self.max_sequence_length = max_sequence_length
        self.head_dim = architecture.head_dim
        self.groups = max(architecture.num_key_value_heads // shards.count, 1)
        self.queries = architecture.num_attention_heads // shards.count // self.groups  # per key-value group on this rank
        self.norm = _norm(architecture)
        self.activation = ACTIVATIONS[architecture.activation]
        self.rotary = None if frequencies is None else self._rotary_tables(frequencies)

    def new_cache(self, padding: Tensor, num_slots: int) -> KVCache:
        """An empty cache for rows whose prompts are padded on the left by `padding` [B] slots."""
        weight = self.weights.embedding
        shape = (len(self.weights.layers), padding.shape[0], self.groups, num_slots, self.head_dim)
        return KVCache(shape, dtype=weight.dtype, device=weight.device, padding=padding)

    def step(self, tokens: Tensor, start: int, cache: KVCache) -> Tensor:
        """Logits float32 [B, V] after the last of `tokens` [B, S], which fill the cache's slots from `start`."""
        end = start + tokens.shape[1]
        slots = torch.arange(start, end, device=tokens.device)
        # Hidden slots, and rows that have ended but not been dropped yet, may lie outside the context.
        positions = (slots - cache.padding[:, None]).clamp_(min=0, max=self.max_sequence_length - 1)
        x = self._embed(tokens, positions)
        rotary = None if self.rotary is None else tuple(table[positions][:, :, None, None] for table in self.rotary)
        mask = self._mask(cache, slots, end)
        for layer, keys, values in zip(self.weights.layers, cache.keys, cache.values, strict=True):
            x = x + self._attention(layer, x, rotary, mask, (keys, values, start, end))
            x = x + self._feed_forward(layer, x)
        return self._logits(self.norm(x[:, -1], self.weights.final_norm))

    def _mask(self, cache: KVCache, slots: Tensor, end: int) -> Tensor | None:
        """Bool [B or 1, 1, S, end], True where a query may look; None where everything before it is visible."""
        if slots.shape[0] == 1:
            return None if cache.visible is None else cache.visible[:, None, None, :end]
        causal = slots[:, None] >= torch.arange(end, device=slots.device)
        if cache.visible is None:
            return causal[None, None]
        own = slots[:, None] == torch.arange(end, device=slots.device)  # a hidden query still sees itself: no row may be all masked
        return ((causal & cache.visible[:, None, :end]) | own)[:, None]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weight = self.weights.embedding
        if self.shards.count == 1:
            x = F.embedding(tokens, weight)
        else:
            local = tokens - self.shards.index * weight.shape[0]
            owned = (local >= 0) & (local < weight.shape[0])
            # `where`, not a product: a rank whose rows are all vocabulary padding may hold anything there, NaN too.
            x = self._sum(torch.where(owned[..., None], F.embedding(torch.where(owned, local, 0), weight), 0.0))
        return x if self.weights.positions is None else x + F.embedding(positions, self.weights.positions)

    def _attention(self, layer: LayerWeights, x: Tensor, rotary: tuple | None, mask: Tensor | None, cache: tuple) -> Tensor:
        keys, values, start, end = cache
        batch, length, _ = x.shape
        mixed = F.linear(self.norm(x, layer.input_norm), layer.qkv.weight, layer.qkv.bias)
        mixed = mixed.view(batch, length, self.groups, self.queries + 2, self.head_dim)
        q_and_k = mixed[..., : self.queries + 1, :]
        if layer.q_norm is not None:
            q = self.norm(q_and_k[..., : self.queries, :], layer.q_norm)
            k = self.norm(q_and_k[..., self.queries :, :], layer.k_norm)
            q_and_k = torch.cat([q, k], dim=-2)
        if rotary is not None:
            q_and_k = _rotate(q_and_k, *rotary)
        keys[:, :, start:end] = q_and_k[..., self.queries, :].transpose(1, 2)
        values[:, :, start:end] = mixed[..., self.queries + 1, :].transpose(1, 2)
        k, v, q = keys[:, :, :end], values[:, :, :end], q_and_k[..., : self.queries, :]
        if length == 1:  # the queries of a group attend to the same keys: they are the "sequence", and no key is repeated
            out = F.scaled_dot_product_attention(q[:, 0], k, v, attn_mask=mask).reshape(batch, 1, -1)
        else:
            q = q.permute(0, 2, 3, 1, 4).reshape(batch, -1, length, self.head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.queries > 1)
            out = out.transpose(1, 2).reshape(batch, length, -1)
        return self._project(out, layer.attention_out)

    def _feed_forward(self, layer: LayerWeights, x: Tensor) -> Tensor:
        x = self.norm(x, layer.mlp_norm)
        if layer.router is None:
            return self._project(self._expand(x, layer.experts[0]), layer.experts[0].down)
        tokens, architecture = x.flatten(0, 1), self.architecture
        routing = route(tokens, layer.router, architecture.experts_per_token, normalize=architecture.normalize_expert_weights)
        # Each rank has its share of every expert; their outputs are summed, so one rank adds the biases.
        return self._sum(mix(tokens, layer.experts, routing, self._expand, biased=self.shards.index == 0)).view_as(x)

    def _expand(self, x: Tensor, weights: FeedForward) -> Tensor:
        return expand(x, weights, self.activation, gated=self.architecture.gated_mlp)

    def _project(self, x: Tensor, weights: Affine) -> Tensor:
        """A matrix whose input is split over the ranks."""
        out = self._sum(F.linear(x, weights.weight))
        return out if weights.bias is None else out + weights.bias

    def _logits(self, hidden: Tensor) -> Tensor:
        # Every rank has equally many rows, the last ones padding: what is beyond the vocabulary is cut after the gather.
        vocabulary = self.architecture.vocab_size
        logits = F.linear(hidden, self.weights.output[:vocabulary]).float()
        if self.shards.count == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.shards.count)]
        dist.all_gather(parts, logits, group=self.shards.group)
        return torch.cat(parts, dim=-1)[:, :vocabulary]

    def _sum(self, x: Tensor) -> Tensor:
        if self.shards.count > 1:
            dist.all_reduce(x, group=self.shards.group)
        return x

    def _rotary_tables(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sign-folded sin, [T, R] for R rotated dimensions: x * cos + roll(x, R/2) * sin rotates the halves, as Megatron does."""
        weight = self.weights.embedding
        angles = torch.arange(self.max_sequence_length, device=weight.device, dtype=torch.float32)[:, None] * frequencies.to(weight.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(weight.dtype), torch.cat([-sin, sin], -1).to(weight.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head, as many as the tables have."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)
    first, rest = x[..., :rotated], x[..., rotated:]
    return torch.cat([torch.addcmul(first * cos, first.roll(rotated // 2, -1), sin), rest], dim=-1)


def _norm(architecture: Architecture) -> Callable[[Tensor, Affine], Tensor]:
    """The architecture's norm over the last dimension."""
    eps = architecture.norm_eps
    if architecture.normalization == Normalization.rms_norm:
        return lambda x, weights: F.rms_norm(x, weights.weight.shape, weights.weight, eps)
    if architecture.normalization == Normalization.layer_norm:
        return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight, weights.bias, eps)
    return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight + 1, weights.bias, eps)
