"""Qwen2, 2.5 and 3: Llama's layout with biases on the query, key and value projections, or with an RMSNorm on each query and key head; and
their mixtures of experts (2407.10671): many small ones, Qwen2's beside one with a gate that every token passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family, Normalization
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import FULL, UNFACTORED, HFConfig, layer_types
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import Layout, NameTable, Rule, llama_like, rule

_HEADS = 32  # of keys and values, where the key is absent


def _switched_windows(hf: HFConfig, has_window: Callable[[int, int], bool] = operator.ge) -> dict[str, Any]:
    """Windows with a switch. `has_window`: whether a layer, from 0, has one by default, given the file's `max_window_layers`."""
    window = hf.optional_size("sliding_window", absent=4096) if hf.flag("use_sliding_window", False) else None
    bound = int(hf.number("max_window_layers", 28))
    return hf.windows(window, lambda number: window is not None and has_window(number, bound))


def _windows_to_hf(architecture: Architecture) -> dict[str, Any]:
    if not architecture.sliding_window:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": architecture.sliding_window, "layer_types": layer_types(architecture)}


def _mixture(hf: HFConfig, *, normalized: bool = False) -> dict[str, Any]:
    """The fields of Qwen's mixtures; `normalized`: whether the weights are, by default."""
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


def _mixture_to_hf(a: Architecture) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": a.dense_layers,
        "num_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "moe_intermediate_size": a.expert_ffn_hidden_size,
        "norm_topk_prob": a.normalize_expert_weights,
    }


_EXPERTS = mapping.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_SHARED_GATE = {"mlp.shared_experts.gate_weight": rule("mlp.shared_expert_gate.weight")}
_SHARED_EXPERTS = _EXPERTS | mapping.feed_forward("mlp.shared_experts", "mlp.shared_expert") | _SHARED_GATE


def _qwen2_moe_from_hf(hf: HFConfig) -> Architecture:
    return replace(
        llama.common_from_hf(hf, key_value_heads=16),
        qkv_bias=hf.flag("qkv_bias", True),
        shared_ffn_hidden_size=hf.size("shared_expert_intermediate_size", absent=5632),
        shared_expert_gate=True,
        **_switched_windows(hf, lambda number, bound: number % 2 == 0 and number < bound),
        **_mixture(hf),
    )


def _qwen2_moe_to_hf(a: Architecture) -> dict[str, Any]:
    own = {"qkv_bias": a.qkv_bias, "shared_expert_intermediate_size": a.shared_ffn_hidden_size} | _windows_to_hf(a)
    return llama.common_to_hf(a) | _mixture_to_hf(a) | own


# Qwen3's are in every layer, with a window for all layers or none.
def _qwen3_moe_from_hf(hf: HFConfig) -> Architecture:
    return replace(
        llama.common_from_hf(hf, key_value_heads=4),
        qk_norm=True,
        **(hf.window_everywhere(absent=4096) if hf.flag("use_sliding_window", False) else {}),
        **_mixture(hf),
    )


def _qwen3_moe_to_hf(a: Architecture) -> dict[str, Any]:
    own = {"use_sliding_window": bool(a.sliding_window), "sliding_window": a.sliding_window or None}
    return llama.common_to_hf(a) | _mixture_to_hf(a) | own


# Qwen3-Next: gated delta nets (2412.06464), every fourth layer attention with a gate, and Qwen2's mixtures of experts. Qwen3.5 without
# images: the same with four projections in a delta net, dense or with a mixture in every layer, whose weights are normalised.
_LINEAR = "linear_attention"
_SIZES = {  # our names: the file's, and transformers' default
    "linear_key_heads": ("linear_num_key_heads", 16),
    "linear_value_heads": ("linear_num_value_heads", 32),
    "linear_key_head_dim": ("linear_key_head_dim", 128),
    "linear_value_head_dim": ("linear_value_head_dim", 128),
    "linear_conv_size": ("linear_conv_kernel_dim", 4),
}
_TWO_PROJECTIONS = {
    "self_attention.linear_qkvz.weight": rule("linear_attn.in_proj_qkvz.weight"),
    "self_attention.linear_ba.weight": rule("linear_attn.in_proj_ba.weight"),
}
_FOUR_PROJECTIONS = {
    "self_attention.linear_qkvz.weight": rule("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", layout=Layout.delta_qkvz),
    "self_attention.linear_ba.weight": rule("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight", layout=Layout.delta_ba),
}
_UNREAD = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # of Qwen's other mixtures, by Qwen3.5


def _next_names(projections: Mapping[str, Rule], mlp: Mapping[str, Rule], dense: Mapping[str, Rule]) -> NameTable:
    """The table of a model whose delta nets have these projections. Layers that predict further tokens are not read."""
    delta_net = {
        "self_attention.dt_bias": rule("linear_attn.dt_bias"),
        "self_attention.A_log": rule("linear_attn.A_log"),
        "self_attention.conv_weight": rule("linear_attn.conv1d.weight", layout=Layout.delta_conv),
        **projections,
        "self_attention.out_norm.weight": rule("linear_attn.norm.weight"),
        "self_attention.linear_out.weight": rule("linear_attn.out_proj.weight"),
    }
    return NameTable(
        layer=mapping.INPUT_NORM | mapping.ATTENTION | mapping.QK_NORM | mapping.MLP_NORM | dict(mlp),
        dense=dense,
        linear=delta_net,
        further=r"mtp\..*",
    )


def _next_common_from_hf(hf: HFConfig, *, key_value_heads: int = 2) -> Architecture:
    """All but the mixtures. `key_value_heads`: the default. Raises ConfigError for YaRN."""
    common = llama.common_from_hf(hf, key_value_heads=key_value_heads, head_dim=256, fraction=0.25, rope_kinds=UNFACTORED)
    every = hf.size("full_attention_interval", absent=4)
    linear = [layer for layer, kind in enumerate(hf.layer_types(_LINEAR, lambda layer: (layer + 1) % every)) if kind == _LINEAR]
    return replace(
        common,
        normalization=Normalization.rms_norm_1p,
        qk_norm=True,
        attention_gate=True,
        linear_attention_layers=linear,
        **({name: hf.size(key, absent=absent) for name, (key, absent) in _SIZES.items()} if linear else {}),
    )


def _shared_expert(hf: HFConfig) -> dict[str, Any]:
    return {"shared_ffn_hidden_size": hf.size("shared_expert_intermediate_size", absent=512), "shared_expert_gate": True}


def _next_common_to_hf(a: Architecture) -> dict[str, Any]:
    own: dict[str, Any] = {key: getattr(a, name) or absent for name, (key, absent) in _SIZES.items()}
    own |= {"layer_types": [_LINEAR if a.is_linear(layer) else FULL for layer in range(a.num_layers)]}
    return llama.common_to_hf(a, always_fraction=True) | own


def _next_to_hf(a: Architecture) -> dict[str, Any]:
    return _next_common_to_hf(a) | _mixture_to_hf(a) | {"shared_expert_intermediate_size": a.shared_ffn_hidden_size}


def _qwen3_5_moe_from_hf(hf: HFConfig) -> Architecture:
    whole = hf.part(intermediate_size=hf.size("moe_intermediate_size"), **_UNREAD)  # no layer is dense
    return replace(_next_common_from_hf(whole), **_shared_expert(hf), **_mixture(whole))


FAMILIES = {
    Family.qwen2: HFFamily(
        "Qwen2ForCausalLM",
        llama_like,
        lambda hf: replace(llama.common_from_hf(hf, key_value_heads=_HEADS), qkv_bias=True, **_switched_windows(hf)),
        lambda a: llama.common_to_hf(a) | _windows_to_hf(a),
    ),
    Family.qwen3: HFFamily(
        "Qwen3ForCausalLM",
        llama_like,
        lambda hf: replace(llama.common_from_hf(hf, key_value_heads=_HEADS, head_dim=128), qk_norm=True, **_switched_windows(hf)),
        lambda a: llama.common_to_hf(a) | _windows_to_hf(a),
        llama.UNBIASED,
    ),
    Family.qwen2_moe: HFFamily(
        "Qwen2MoeForCausalLM",
        lambda a: llama_like(a, mlp=_SHARED_EXPERTS, dense=mapping.MLP),
        _qwen2_moe_from_hf,
        _qwen2_moe_to_hf,
    ),
    Family.qwen3_moe: HFFamily(
        "Qwen3MoeForCausalLM",
        lambda a: llama_like(a, mlp=_EXPERTS, dense=mapping.MLP),
        _qwen3_moe_from_hf,
        _qwen3_moe_to_hf,
        llama.UNBIASED,
    ),
    Family.qwen3_next: HFFamily(
        "Qwen3NextForCausalLM",
        _next_names(_TWO_PROJECTIONS, _SHARED_EXPERTS, mapping.MLP),
        lambda hf: replace(_next_common_from_hf(hf), **_shared_expert(hf), **_mixture(hf, normalized=True)),
        _next_to_hf,
        llama.UNBIASED,
    ),
    Family.qwen3_5_text: HFFamily(
        "Qwen3_5ForCausalLM",
        _next_names(_FOUR_PROJECTIONS, mapping.MLP, {}),
        lambda hf: _next_common_from_hf(hf, key_value_heads=4),
        _next_common_to_hf,
        llama.UNBIASED,
    ),
    Family.qwen3_5_moe_text: HFFamily(
        "Qwen3_5MoeForCausalLM",
        _next_names(_FOUR_PROJECTIONS, _SHARED_EXPERTS, {}),
        _qwen3_5_moe_from_hf,
        lambda a: {key: value for key, value in _next_to_hf(a).items() if key not in ("intermediate_size", *_UNREAD)},
        llama.UNBIASED,
    ),
}
