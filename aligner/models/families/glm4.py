"""GLM-4-0414: norms around attention and the feed-forward layer, and heads half of whose dimensions are rotated in neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable, rule

_POST_ATTENTION = {"post_attention_layernorm.weight": rule("post_self_attn_layernorm.weight")}
_POST_MLP = {"post_mlp_layernorm.weight": rule("post_mlp_layernorm.weight")}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases that it has."""
    biases = mapping.QKV_BIAS if architecture.qkv_bias else {}
    attention = mapping.INPUT_NORM | mapping.QKV | biases | mapping.ATTENTION_OUT | _POST_ATTENTION
    layer = attention | mapping.MLP_NORM | mapping.PACKED_MLP | _POST_MLP
    return NameTable(before=mapping.BEFORE, layer=layer, after=mapping.FINAL_NORM | mapping.OUTPUT)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config."""
    common = llama.common_from_hf(hf, Family.glm4, key_value_heads=2, head_dim=128, norm_eps=1.5625e-07, fraction=0.5)
    return replace(common, qkv_bias=hf.flag("attention_bias", True), post_norms=True, rotary_interleaved=True)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    own = {"attention_bias": a.qkv_bias, "partial_rotary_factor": a.rotary_fraction, "eos_token_id": None, "pad_token_id": None}
    hf = llama.common_to_hf(a) | {"architectures": ["Glm4ForCausalLM"]} | own
    hf["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    return hf
