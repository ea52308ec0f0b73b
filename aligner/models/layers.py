"""The two modules that Megatron-Core's local layer specification lacks, plugged in through that specification (nothing is patched):
a norm that works with sequence parallelism, and a core attention over `scaled_dot_product_attention` with grouped queries."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.parallel.mcore import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    tensor_parallel,
)


class Norm:
    """RMSNorm or LayerNorm whose weights say whether their gradients must be summed over the tensor-parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class CoreAttention(MegatronModule):
    """Causal attention over whole, right-padded sequences; no mask is needed, since padding comes after every real token."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads * D]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():  # other heads, other dropout: ranks must not share the noise
                out = self._attend(q, k, v, dropout)
        else:
            out = self._attend(q, k, v, dropout)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return {}


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The local layer specification with our norm and core attention, for every layer of this rank."""
    layer = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization))
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)
