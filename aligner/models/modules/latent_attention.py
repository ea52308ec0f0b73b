"""Multi-head latent attention (DeepSeek-V2, 2405.04434, 2.1): keys and values of all heads are made of one small vector per token, the
latent, beside which each token has one rotated key for all heads.

Megatron-Core's own module makes its own angles, so packed rows and shared prompts would not reach it, and splits the projections onto the
latents. Here these are whole on every rank, and the rotated key's gradient is summed over the heads of all. A head's rotated dimensions
come first, as Megatron-Core rotates them; queries and keys have the same order.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from aligner.models.architecture.rope import neighbours_apart
from aligner.models.config import Architecture
from aligner.models.modules.attention import placed
from aligner.parallel import mcore

LATENT_EPS = 1e-6  # of the latents' norms, whatever a model's own rms_norm_eps is: in `transformers` too


class WholeLinear(torch.nn.Linear):
    """A linear layer without bias that every tensor-parallel rank has whole; under sequence parallelism for its part of a sequence."""

    def __init__(self, config: mcore.TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, **placed(config))
        self.weight.sequence_parallel = config.sequence_parallel


class LatentAttention(mcore.SelfAttention):
    """Megatron-Core's attention over other queries, keys and values. It has no `linear_qkv`: the specification's is an `IdentityOp`."""

    def __init__(
        self,
        config: mcore.TransformerConfig,
        submodules: Any,
        *args: Any,
        architecture: Architecture,
        norm: mcore.ModuleSpec,
        linear: type[torch.nn.Module],
        **options: Any,
    ) -> None:
        config = copy.copy(config)
        config.kv_channels = architecture.value_head_dim  # of what the layer behind attention reads
        super().__init__(config, submodules, *args, **options)
        self.architecture = a = architecture
        self.heads = a.num_attention_heads // config.tensor_model_parallel_size

        def normed(size: int) -> torch.nn.Module:
            return mcore.build_module(norm, config=config, hidden_size=size, eps=LATENT_EPS)

        def split(inputs: int, outputs: int) -> torch.nn.Module:
            settings = {"init_method": config.init_method, "bias": False, "tp_group": self.pg_collection.tp}
            return linear(inputs, outputs, config=config, gather_output=False, skip_bias_add=False, **settings)

        if a.query_latent_size:
            self.linear_q_down_proj = WholeLinear(config, a.hidden_size, a.query_latent_size)
            self.q_layernorm = normed(a.query_latent_size)
            self.linear_q_up_proj = split(a.query_latent_size, a.num_attention_heads * a.head_dim)
        else:
            self.linear_q_proj = split(a.hidden_size, a.num_attention_heads * a.head_dim)
        self.linear_kv_down_proj = WholeLinear(config, a.hidden_size, a.latent_size + a.rotated)
        self.kv_layernorm = normed(a.latent_size)
        self.linear_kv_up_proj = split(a.latent_size, a.num_attention_heads * (a.head_dim - a.rotated + a.value_head_dim))

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [S, B, heads, D] before they are rotated, values [S, B, heads, value D]; S is of the whole sequence."""
        a = self.architecture
        plain = a.head_dim - a.rotated
        latent, shared = self.linear_kv_down_proj(hidden_states).split([a.latent_size, a.rotated], dim=-1)
        if a.query_latent_size:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        else:
            queries = self.linear_q_proj(hidden_states)[0]
        query_plain, query_rotated = queries.unflatten(-1, (self.heads, -1)).split([plain, a.rotated], dim=-1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_plain, value = expanded.unflatten(-1, (self.heads, -1)).split([plain, a.value_head_dim], dim=-1)
        # The whole sequence's rotated keys, whose gradient is the sum over all ranks' heads.
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            shared = mcore.gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=True, group=group)
        else:
            shared = mcore.copy_to_tensor_model_parallel_region(shared, group=group)
        key_rotated = shared[..., None, :].expand(*key_plain.shape[:-1], -1)
        if a.rope_attention_factor != 1:
            query_rotated, key_rotated = query_rotated * a.rope_attention_factor, key_rotated * a.rope_attention_factor
        query, key = torch.cat([query_rotated, query_plain], dim=-1), torch.cat([key_rotated, key_plain], dim=-1)
        if a.rotary_interleaved:
            query, key = (neighbours_apart(x, a.rotated) for x in (query, key))
        return query, key, value
