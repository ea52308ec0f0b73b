"""What mixtures like DeepSeek's share: groups of experts, sigmoid scores with a bias, an expert that every token passes, first layers
without experts (2405.04434, 2.2; 2412.19437, 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.models.config import Architecture
from aligner.models.families import mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, NameTable, Rule, rule

_BIAS = {"mlp.router.expert_bias": rule("mlp.gate.e_score_correction_bias")}


def shared(block: str) -> dict[str, Rule]:
    """Rows of the expert that every token passes, called `block`."""
    return {
        "mlp.shared_experts.linear_fc1.weight": rule(f"{block}.gate_proj.weight", f"{block}.up_proj.weight", layout=Layout.gate_up),
        "mlp.shared_experts.linear_fc2.weight": rule(f"{block}.down_proj.weight"),
    }


def names(a: Architecture, attention: Mapping[str, Rule]) -> NameTable:
    """The table of a model with these rows for its attention. Layers behind the last one predict further tokens: they are not read."""
    routed = mapping.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    mixture = (_BIAS if a.router_bias else {}) | (shared("mlp.shared_experts") if a.shared_ffn_hidden_size else {}) | routed
    return NameTable(
        before=mapping.BEFORE,
        layer=mapping.INPUT_NORM | dict(attention) | mapping.MLP_NORM | mixture,
        dense=mapping.MLP,
        after=mapping.FINAL_NORM | mapping.OUTPUT,
        further=rf"model\.layers\.{a.num_layers}\..*",
    )


def from_hf(hf: HFConfig, *, groups: int, best: int, dense: int, scale: float, sigmoid: bool) -> dict[str, Any]:
    """The fields of an `Architecture`. `groups`: 0 where the file's count no longer; `best`: experts whose scores make a group's; `dense`
    and `scale`: first layers without experts and the factor on weights of a file that does not say."""
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


def to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `from_hf`, for a model that has as many layers without experts as come first."""
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


def of_qwen(hf: HFConfig, *, normalized: bool = False) -> dict[str, Any]:
    """The fields of Qwen's mixtures; `normalized`: whether the weights of a file that does not say are."""
    layers = range(hf.size("num_hidden_layers"))
    step, listed = hf.size("decoder_sparse_step", absent=1), hf.value("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise hf.refusal("mlp_only_layers", listed, "a list of layers' numbers, from 0")
    return {
        "num_experts": hf.size("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        "experts_per_token": hf.size("num_experts_per_tok"),
        "expert_ffn_hidden_size": hf.size("moe_intermediate_size"),
        "normalize_expert_weights": hf.flag("norm_topk_prob", normalized),
        "dense_layers": [layer for layer in layers if layer in listed or (layer + 1) % step],
    }


def of_qwen_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `of_qwen`."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": a.dense_layers,
        "num_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "moe_intermediate_size": a.expert_ffn_hidden_size,
        "norm_topk_prob": a.normalize_expert_weights,
    }
