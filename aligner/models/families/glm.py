"""GLM: heads half of whose dimensions are rotated. GLM-4-0414 has norms around attention and the feed-forward layer, and rotates
neighbouring pairs; GLM-4.5 (2508.06471) has DeepSeek-V3's mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import deepseek, llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable, rule

_POST_ATTENTION = {"post_attention_layernorm.weight": rule("post_self_attn_layernorm.weight")}
_POST_MLP = {"post_mlp_layernorm.weight": rule("post_mlp_layernorm.weight")}
_MOE_FIXED = {"norm_topk_prob": (True,)}


def _names(architecture: Architecture) -> NameTable:
    biases = mapping.QKV_BIAS if architecture.qkv_bias else {}
    attention = mapping.INPUT_NORM | mapping.QKV | biases | mapping.ATTENTION_OUT | _POST_ATTENTION
    layer = attention | mapping.MLP_NORM | mapping.PACKED_MLP | _POST_MLP
    return NameTable(layer=layer)


def _from_hf(hf: HFConfig) -> Architecture:
    common = llama.common_from_hf(hf, Family.glm4, key_value_heads=2, head_dim=128, norm_eps=1.5625e-07, fraction=0.5)
    return replace(common, qkv_bias=hf.flag("attention_bias", True), post_norms=True, rotary_interleaved=True)


def _common_to_hf(a: Architecture) -> dict[str, Any]:
    """With the rotated part of heads even if they are rotated whole: the default is half."""
    hf = llama.common_to_hf(a) | {"attention_bias": a.qkv_bias, "partial_rotary_factor": a.rotary_fraction}
    hf["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    return hf


def _moe_names(architecture: Architecture) -> NameTable:
    biases = mapping.QKV_BIAS if architecture.qkv_bias else {}
    norms = mapping.QK_NORM if architecture.qk_norm else {}
    return deepseek.mixture_names(architecture, mapping.QKV | biases | norms | mapping.ATTENTION_OUT)


def _moe_from_hf(hf: HFConfig) -> Architecture:
    hf.only(_MOE_FIXED)
    common = llama.common_from_hf(hf, Family.glm4_moe, key_value_heads=8, norm_eps=1e-5, fraction=0.5)
    routing = deepseek.mixture_from_hf(hf, groups=hf.size("n_group", absent=1), best=2, dense=1, scale=1.0, sigmoid=True)
    return replace(common, qkv_bias=hf.flag("attention_bias", False), qk_norm=hf.flag("use_qk_norm", False), **routing)


FAMILIES = {
    Family.glm4: HFFamily("Glm4ForCausalLM", _names, _from_hf, lambda a: _common_to_hf(a) | {"eos_token_id": None, "pad_token_id": None}),
    Family.glm4_moe: HFFamily(
        "Glm4MoeForCausalLM", _moe_names, _moe_from_hf, lambda a: _common_to_hf(a) | deepseek.mixture_to_hf(a) | {"use_qk_norm": a.qk_norm}
    ),
}
