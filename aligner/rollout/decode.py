"""Incremental decoding with the policy's own weights: the arithmetic of its Megatron-Core layers without their training machinery.

The parameters are read in place (nothing is copied, so a refit at equal layout costs nothing). A decode step through the training modules
takes several times as long on small batches, nearly all of it in Python; the tests hold this pass equal to the modules' forward.

Sequences are aligned on the right: all rows write the same cache slot in a step, and rows with shorter prompts hide their first slots.
Tensor parallelism: as in training, each rank holds its heads, its share of the MLP and of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.build import LanguageModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's parameters on this rank, by role; optional ones are None where the family lacks them."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


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
    """The forward pass of a `LanguageModel` over a KV cache. Collective over the tensor-parallel group."""

    def __init__(self, module: LanguageModel) -> None:
        architecture, self.tp = module.architecture, module.pg_collection.tp
        if architecture.num_key_value_heads % self.tp.size():
            raise ConfigError(
                f"parallel.tp={self.tp.size()}: the built-in rollout engine needs it to divide num_key_value_heads="
                f"{architecture.num_key_value_heads}"
            )
        self.module = module
        self.eps = architecture.norm_eps
        self.head_dim = architecture.head_dim
        self.groups = architecture.num_key_value_heads // self.tp.size()
        self.queries = architecture.num_attention_heads // architecture.num_key_value_heads
        self.cos, self.sin = self._rotary_tables()
        self.layers = self._layers()

    def new_cache(self, padding: Tensor, num_slots: int) -> KVCache:
        """An empty cache for rows whose prompts are padded on the left by `padding` [B] slots."""
        weight = self.layers[0].qkv
        shape = (len(self.layers), padding.shape[0], self.groups, num_slots, self.head_dim)
        return KVCache(shape, dtype=weight.dtype, device=weight.device, padding=padding)

    def step(self, tokens: Tensor, start: int, cache: KVCache) -> Tensor:
        """Logits float32 [B, V] after the last of `tokens` [B, S], which fill the cache's slots from `start`."""
        num_tokens = tokens.shape[1]
        end = start + num_tokens
        slots = torch.arange(start, end, device=tokens.device)
        # Hidden slots, and rows that have ended but not been dropped yet, may lie outside the context.
        positions = (slots - cache.padding[:, None]).clamp_(min=0, max=self.cos.shape[0] - 1)
        rotary = (self.cos[positions][:, :, None, None], self.sin[positions][:, :, None, None])
        mask = self._mask(cache, slots, end)
        x = self._embed(tokens)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = x + self._attention(layer, x, rotary, mask, (keys, values, start, end))
            x = x + self._mlp(layer, x)
        last = F.rms_norm(x[:, -1], (x.shape[-1],), self.module.decoder.final_layernorm.weight, self.eps)
        return self._logits(last)

    def _mask(self, cache: KVCache, slots: Tensor, end: int) -> Tensor | None:
        """Bool [B or 1, 1, S, end], True where a query may look; None where everything before it is visible."""
        if slots.shape[0] == 1:
            return None if cache.visible is None else cache.visible[:, None, None, :end]
        causal = slots[:, None] >= torch.arange(end, device=slots.device)
        if cache.visible is None:
            return causal[None, None]
        own = slots[:, None] == torch.arange(end, device=slots.device)  # a hidden query still sees itself: no row may be all masked
        return ((causal & cache.visible[:, None, :end]) | own)[:, None]

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.module.embedding.word_embeddings.weight
        if self.tp.size() == 1:
            return F.embedding(tokens, weight)
        local = tokens - self.tp.rank() * weight.shape[0]
        owned = (local >= 0) & (local < weight.shape[0])
        # `where`, not a product: a rank whose rows are all vocabulary padding may hold anything there, NaN too.
        return self._sum(torch.where(owned[..., None], F.embedding(torch.where(owned, local, 0), weight), 0.0))

    def _attention(self, layer: LayerWeights, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: tuple) -> Tensor:
        keys, values, start, end = cache
        batch, length, hidden = x.shape
        mixed = F.linear(F.rms_norm(x, (hidden,), layer.input_norm, self.eps), layer.qkv, layer.qkv_bias)
        mixed = mixed.view(batch, length, self.groups, self.queries + 2, self.head_dim)
        q_and_k = mixed[..., : self.queries + 1, :]
        if layer.q_norm is not None:
            q = F.rms_norm(q_and_k[..., : self.queries, :], (self.head_dim,), layer.q_norm, self.eps)
            k = F.rms_norm(q_and_k[..., self.queries :, :], (self.head_dim,), layer.k_norm, self.eps)
            q_and_k = torch.cat([q, k], dim=-2)
        q_and_k = torch.addcmul(q_and_k * rotary[0], q_and_k.roll(self.head_dim // 2, -1), rotary[1])
        keys[:, :, start:end] = q_and_k[..., self.queries, :].transpose(1, 2)
        values[:, :, start:end] = mixed[..., self.queries + 1, :].transpose(1, 2)
        k, v, q = keys[:, :, :end], values[:, :, :end], q_and_k[..., : self.queries, :]
        if length == 1:  # the queries of a group attend to the same keys: they are the "sequence", and no key is repeated
            out = F.scaled_dot_product_attention(q[:, 0], k, v, attn_mask=mask).reshape(batch, 1, -1)
        else:
            q = q.permute(0, 2, 3, 1, 4).reshape(batch, -1, length, self.head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.queries > 1)
            out = out.transpose(1, 2).reshape(batch, length, -1)
        return self._sum(F.linear(out, layer.attention_out))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.eps), layer.gate_up).chunk(2, dim=-1)
        return self._sum(F.linear(F.silu(gate) * up, layer.down))

    def _logits(self, hidden: Tensor) -> Tensor:
        weight, _ = self.module.vocabulary_weight()
        logits = F.linear(hidden, weight).float()
        if self.tp.size() == 1:
            return logits
        # Padding is cut from the last rank's rows only, so the parts have unequal widths: pad, gather, cut.
        width = self.module.vocab_size // self.tp.size()
        local = F.pad(logits, (0, width - logits.shape[1]))
        parts = [torch.empty_like(local) for _ in range(self.tp.size())]
        dist.all_gather(parts, local, group=self.tp)
        return torch.cat(parts, dim=-1)[:, : self.module.architecture.vocab_size]

    def _sum(self, x: Tensor) -> Tensor:
        if self.tp.size() > 1:
            dist.all_reduce(x, group=self.tp)
        return x

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sign-folded sin, [T, D]: x * cos + roll(x, D/2) * sin rotates the halves, as Megatron-Core does."""
        weight = self.module.embedding.word_embeddings.weight
        frequencies = self.module.rotary_pos_emb.inv_freq.to(weight.device)
        angles = torch.arange(self.module.max_sequence_length, device=weight.device, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(weight.dtype), torch.cat([-sin, sin], -1).to(weight.dtype)

    def _layers(self) -> list[LayerWeights]:
        architecture = self.module.architecture
        return [
            LayerWeights(
                input_norm=layer.input_layernorm.weight,
                qkv=layer.self_attention.linear_qkv.weight,
                qkv_bias=layer.self_attention.linear_qkv.bias if architecture.qkv_bias else None,
                q_norm=layer.self_attention.q_layernorm.weight if architecture.qk_norm else None,
                k_norm=layer.self_attention.k_layernorm.weight if architecture.qk_norm else None,
                attention_out=layer.self_attention.linear_proj.weight,
                mlp_norm=layer.pre_mlp_layernorm.weight,
                gate_up=layer.mlp.linear_fc1.weight,
                down=layer.mlp.linear_fc2.weight,
            )
            for layer in self.module.decoder.layers
        ]
