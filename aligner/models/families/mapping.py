"""Weight names and layouts: Hugging Face <-> Megatron-Core, for one tensor at a time.

Megatron fuses q, k and v into one matrix whose rows are ordered by key-value group, `[q..q k v] [q..q k v] ...`, so that a tensor-parallel
shard holds whole groups; and gate and up into one matrix `[gate; up]` of which each shard holds `[gate_r; up_r]`. The vocabulary is padded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from aligner.models.config import Architecture


class Layout(str, Enum):
    """How the Hugging Face tensors of a rule make up the Megatron one."""

    plain = "plain"
    qkv = "qkv"
    gate_up = "gate_up"
    vocabulary = "vocabulary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds."""

    hf_names: tuple[str, ...]
    layout: Layout


def _rule(*hf_names: str, layout: Layout = Layout.plain) -> Rule:
    return Rule(hf_names=hf_names, layout=layout)


TOP_LEVEL = {
    "embedding.word_embeddings.weight": _rule("model.embed_tokens.weight", layout=Layout.vocabulary),
    "decoder.final_layernorm.weight": _rule("model.norm.weight"),
    "output_layer.weight": _rule("lm_head.weight", layout=Layout.vocabulary),
}
PER_LAYER = {
    "input_layernorm.weight": _rule("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": _rule("post_attention_layernorm.weight"),
    "self_attention.linear_qkv.weight": _rule(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", layout=Layout.qkv
    ),
    "self_attention.linear_qkv.bias": _rule("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", layout=Layout.qkv),
    "self_attention.linear_proj.weight": _rule("self_attn.o_proj.weight"),
    "self_attention.q_layernorm.weight": _rule("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _rule("self_attn.k_norm.weight"),
    "mlp.linear_fc1.weight": _rule("mlp.gate_proj.weight", "mlp.up_proj.weight", layout=Layout.gate_up),
    "mlp.linear_fc2.weight": _rule("mlp.down_proj.weight"),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


def find_rule(megatron_name: str, *, first_layer: int = 0) -> Rule | None:
    """The rule of a parameter, with layer numbers filled in; None for one that Hugging Face models do not have (a value head).

    `first_layer` is the global number of this pipeline stage's first layer.
    """
    layer = _LAYER_NAME.fullmatch(megatron_name)
    if layer is None:
        return TOP_LEVEL.get(megatron_name)
    rule = PER_LAYER[layer[2]]
    prefix = f"model.layers.{first_layer + int(layer[1])}."
    return Rule(hf_names=tuple(prefix + name for name in rule.hf_names), layout=rule.layout)


def to_megatron(layout: Layout, tensors: list[Tensor], architecture: Architecture, padded_vocab_size: int) -> Tensor:
    """Full Hugging Face tensors -> the full Megatron tensor."""
    if layout == Layout.qkv:
        groups = architecture.num_key_value_heads
        q, k, v = (t.reshape(groups, -1, *t.shape[1:]) for t in tensors)
        return torch.cat([q, k, v], dim=1).reshape(-1, *tensors[0].shape[1:])
    if layout == Layout.vocabulary:
        padding = tensors[0].new_zeros(padded_vocab_size - tensors[0].shape[0], tensors[0].shape[1])
        return torch.cat([tensors[0], padding])
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def to_hf(layout: Layout, tensor: Tensor, architecture: Architecture) -> list[Tensor]:
    """The full Megatron tensor -> full Hugging Face tensors, in the order of the rule's names."""
    if layout == Layout.qkv:
        groups, size = architecture.num_key_value_heads, architecture.head_dim
        queries = architecture.num_attention_heads // groups
        fused = tensor.reshape(groups, (queries + 2) * size, *tensor.shape[1:])
        parts = fused.split([queries * size, size, size], dim=1)
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]
    if layout == Layout.gate_up:
        return list(tensor.chunk(2))
    if layout == Layout.vocabulary:
        return [tensor[: architecture.vocab_size]]
    return [tensor]


def shard(layout: Layout, tensor: Tensor, *, dim: int, num_shards: int, index: int) -> Tensor:
    """This tensor-parallel rank's part of a full Megatron tensor."""
    if layout == Layout.gate_up:
        return torch.cat([half.chunk(num_shards)[index] for half in tensor.chunk(2)])
    return tensor.chunk(num_shards, dim=dim)[index]


def unshard(layout: Layout, shards: list[Tensor], *, dim: int) -> Tensor:
    """The inverse of `shard` over all ranks."""
    if layout == Layout.gate_up:
        return torch.cat([torch.cat([s.chunk(2)[half] for s in shards]) for half in (0, 1)])
    return torch.cat(shards, dim=dim)
