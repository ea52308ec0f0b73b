"""DeepSeek: latent attention and a mixture of many small experts. V2 (2405.04434) chooses them by their softmax, with groups or without; V3
(2412.19437) evens out their load by a bias, without auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping
from aligner.models.families.dense import glm_to_hf
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable, Rule, rule

_QUERIES = {"self_attention.linear_q_proj.weight": rule("self_attn.q_proj.weight")}
_LATENT = {"self_attention.linear_kv_down_proj.weight": rule("self_attn.kv_a_proj_with_mqa.weight")}
_LATENT_OF_QUERIES = {"self_attention.linear_q_down_proj.weight": rule("self_attn.q_a_proj.weight")} | _LATENT
_EXPANDED_QUERIES = {
    "self_attention.q_layernorm.weight": rule("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": rule("self_attn.q_b_proj.weight"),
}
_EXPANDED = {
    "self_attention.kv_layernorm.weight": rule("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": rule("self_attn.kv_b_proj.weight"),
}
_FIXED = llama.UNBIASED | {"moe_layer_freq": (1,)}
_V2_FIXED = _FIXED | {"norm_topk_prob": (False,), "scoring_func": ("softmax",), "mlp_bias": (False,)}
_V2_GROUPED = {"greedy": False, "group_limited_greedy": True}
_V3_FIXED = _FIXED | {"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_ROUTER_BIAS = {"mlp.router.expert_bias": rule("mlp.gate.e_score_correction_bias")}


def mixture_names(a: Architecture, attention: Mapping[str, Rule]) -> NameTable:
    """The table of a model with these rows for its attention. Layers behind the last one predict further tokens: they are not read."""
    routed = mapping.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    shared = mapping.feed_forward("mlp.shared_experts", "mlp.shared_experts") if a.shared_ffn_hidden_size else {}
    mixture = (_ROUTER_BIAS if a.router_bias else {}) | shared | routed
    return NameTable(
        layer=mapping.INPUT_NORM | dict(attention) | mapping.MLP_NORM | mixture,
        dense=mapping.MLP,
        further=rf"model\.layers\.{a.num_layers}\..*",
    )


def mixture_from_hf(hf: HFConfig, *, groups: int, best: int, dense: int, scale: float, sigmoid: bool) -> dict[str, Any]:
    """The fields of an `Architecture`. `groups`: 0 to ignore the file's; `best`: experts whose scores make a group's; `dense`
    and `scale`: defaults of the first layers without experts and of the factor on weights."""
    inner, layers = hf.size("moe_intermediate_size"), hf.size("num_hidden_layers")
    first = hf.number("first_k_dense_replace", dense)
    return {
        "num_experts": hf.size("n_routed_experts", "num_local_experts", "num_experts"),
        "experts_per_token": hf.size("num_experts_per_tok"),
        "expert_ffn_hidden_size": inner,
        "normalize_expert_weights": sigmoid,
        "dense_layers": list(range(min(int(first), layers))),
        "shared_ffn_hidden_size": inner * hf.size("n_shared_experts"),
        "router_sigmoid": sigmoid,
        "router_bias": sigmoid,
        "router_groups": groups if groups > 1 else 0,
        "router_groups_per_token": hf.size("topk_group") if groups > 1 else 0,
        "router_group_best": best if groups > 1 else 1,
        "router_scale": hf.number("routed_scaling_factor", scale),
    }


def mixture_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `mixture_from_hf`, for a model that has as many layers without experts as come first."""
    return {
        "n_routed_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "moe_intermediate_size": a.expert_ffn_hidden_size,
        "n_shared_experts": a.shared_ffn_hidden_size // max(1, a.expert_ffn_hidden_size),
        "first_k_dense_replace": len(a.dense_layers),
        "n_group": a.router_groups or 1,
        "topk_group": a.router_groups_per_token or 1,
        "norm_topk_prob": a.normalize_expert_weights,
        "routed_scaling_factor": a.router_scale,
        "num_nextn_predict_layers": 0,
    }


def _names(architecture: Architecture) -> NameTable:
    queries = _LATENT_OF_QUERIES | _EXPANDED_QUERIES if architecture.query_latent_size else _QUERIES | _LATENT
    return mixture_names(architecture, queries | _EXPANDED | mapping.ATTENTION_OUT)


def _common_from_hf(hf: HFConfig, *, interleaved: bool, routing: dict[str, Any]) -> Architecture:
    rotated, values = hf.size("qk_rope_head_dim"), hf.size("v_head_dim")
    head_dim = hf.size("qk_nope_head_dim") + rotated
    if values > head_dim:
        raise hf.refusal("v_head_dim", values, f"at most qk_nope_head_dim + qk_rope_head_dim={head_dim}")
    whole = hf.part(head_dim=head_dim, num_key_value_heads=hf.size("num_attention_heads"))
    scaling = hf.value("rope_scaling") or hf.value("rope_parameters") or {}
    return replace(
        llama.common_from_hf(whole, rope=hf.rope(kinds=("yarn",)) | {"rotary_fraction": 1.0}),
        rotary_fraction=rotated / head_dim,
        rotary_interleaved=interleaved,
        rope_score_scale=hf.checked("mscale_all_dim", scaling.get("mscale_all_dim") or 0),
        latent_size=hf.size("kv_lora_rank"),
        query_latent_size=hf.optional_size("q_lora_rank", absent=1536) or 0,
        value_head_dim=values,
        **routing,
    )


def _common_to_hf(a: Architecture) -> dict[str, Any]:
    return (
        llama.common_to_hf(replace(a, rotary_fraction=1.0))
        | mixture_to_hf(a)
        | {
            "head_dim": a.rotated,
            "qk_rope_head_dim": a.rotated,
            "qk_nope_head_dim": a.head_dim - a.rotated,
            "v_head_dim": a.value_head_dim,
            "kv_lora_rank": a.latent_size,
            "q_lora_rank": a.query_latent_size or None,
        }
    )


def _v2_from_hf(hf: HFConfig) -> Architecture:
    groups = hf.size("n_group") if hf.choice("topk_method", _V2_GROUPED, "greedy") else 0
    routing = mixture_from_hf(hf, groups=groups, best=1, dense=0, scale=1.0, sigmoid=False)
    return _common_from_hf(hf, interleaved=True, routing=routing)


def _v2_to_hf(a: Architecture) -> dict[str, Any]:
    method = next(name for name, grouped in _V2_GROUPED.items() if grouped == bool(a.router_groups))
    return _common_to_hf(a) | {"topk_method": method}


def _v3_from_hf(hf: HFConfig) -> Architecture:
    routing = mixture_from_hf(hf, groups=hf.size("n_group"), best=2, dense=3, scale=2.5, sigmoid=True)
    return _common_from_hf(hf, interleaved=hf.flag("rope_interleave", True), routing=routing)


# GLM-4.5 (2508.06471): GLM-4's heads, DeepSeek-V3's mixture of experts.
def _glm_from_hf(hf: HFConfig) -> Architecture:
    common = llama.common_from_hf(hf, key_value_heads=8, norm_eps=1e-5, fraction=0.5)
    routing = mixture_from_hf(hf, groups=hf.size("n_group", absent=1), best=2, dense=1, scale=1.0, sigmoid=True)
    return replace(common, qkv_bias=hf.flag("attention_bias", False), qk_norm=hf.flag("use_qk_norm", False), **routing)


FAMILIES = {
    Family.deepseek_v2: HFFamily("DeepseekV2ForCausalLM", _names, _v2_from_hf, _v2_to_hf, _V2_FIXED),
    Family.deepseek_v3: HFFamily(
        "DeepseekV3ForCausalLM",
        _names,
        _v3_from_hf,
        lambda a: _common_to_hf(a) | {"rope_interleave": a.rotary_interleaved},
        _V3_FIXED,
    ),
    Family.glm4_moe: HFFamily(
        "Glm4MoeForCausalLM",
        lambda a: mixture_names(a, mapping.attention(a)),
        _glm_from_hf,
        lambda a: glm_to_hf(a) | mixture_to_hf(a) | {"use_qk_norm": a.qk_norm},
        llama.DROPOUT | {"norm_topk_prob": (True,)},
    ),
}
