"""Qwen3-Next: gated delta nets (2412.06464), every fourth layer attention with a gate, and Qwen2's mixtures of experts; and Qwen3.5 without
images: the same with four projections in a delta net, dense or with a mixture in every layer, whose weights are normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family, Normalization
from aligner.models.families import llama, mapping, mixture, qwen, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import Layout, NameTable, Rule, rule
from aligner.models.families.rope_scaling import UNFACTORED

_LINEAR, _FIXED = "linear_attention", {"attention_bias": (False,)}
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


def _names(projections: Mapping[str, Rule], mlp: Mapping[str, Rule], dense: Mapping[str, Rule]) -> NameTable:
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
        before=mapping.BEFORE,
        layer=mapping.INPUT_NORM | mapping.ATTENTION | mapping.QK_NORM | mapping.MLP_NORM | dict(mlp),
        dense=dense,
        linear=delta_net,
        after=mapping.FINAL_NORM | mapping.OUTPUT,
        further=r"mtp\..*",
    )


def _common_from_hf(hf: HFConfig, family: Family, *, key_value_heads: int = 2) -> Architecture:
    """All but the mixtures. `key_value_heads`: of a file that does not say. Raises ConfigError for biases on attention, and for YaRN."""
    hf.only(_FIXED)
    common = llama.common_from_hf(hf, family, key_value_heads=key_value_heads, head_dim=256, fraction=0.25, rope_kinds=UNFACTORED)
    linear = _linear_layers(hf, common.num_layers)
    return replace(
        common,
        normalization=Normalization.rms_norm_1p,
        qk_norm=True,
        attention_gate=True,
        linear_attention_layers=linear,
        **({name: hf.size(key, absent=absent) for name, (key, absent) in _SIZES.items()} if linear else {}),
    )


def _shared_expert(hf: HFConfig) -> dict[str, Any]:
    """The fields of what every token passes beside its experts."""
    return {"shared_ffn_hidden_size": hf.size("shared_expert_intermediate_size", absent=512), "shared_expert_gate": True}


def _linear_layers(hf: HFConfig, count: int) -> list[int]:
    """Numbers of the layers that are delta nets."""
    types, every = hf.value("layer_types"), hf.size("full_attention_interval", absent=4)
    if types is None:
        return [layer for layer in range(count) if (layer + 1) % every]
    if not isinstance(types, list) or len(types) != count or set(types) - {_LINEAR, windows.FULL}:
        raise hf.refusal("layer_types", types, f'{count} of "{windows.FULL}" and "{_LINEAR}", one for each layer')
    return [layer for layer, kind in enumerate(types) if kind == _LINEAR]


def _common_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `_common_from_hf`."""
    own: dict[str, Any] = {key: getattr(a, name) or absent for name, (key, absent) in _SIZES.items()}
    own |= {"layer_types": [_LINEAR if a.is_linear(layer) else windows.FULL for layer in range(a.num_layers)], "attention_bias": False}
    hf = llama.common_to_hf(a) | own | {"partial_rotary_factor": a.rotary_fraction}
    hf["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    return hf


def _next_from_hf(hf: HFConfig) -> Architecture:
    return replace(_common_from_hf(hf, Family.qwen3_next), **_shared_expert(hf), **mixture.of_qwen(hf, normalized=True))


def _next_to_hf(a: Architecture) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": a.shared_ffn_hidden_size, "architectures": ["Qwen3NextForCausalLM"]}
    return _common_to_hf(a) | mixture.of_qwen_to_hf(a) | shared


def _from_hf(hf: HFConfig) -> Architecture:
    return _common_from_hf(hf, Family.qwen3_5_text, key_value_heads=4)


def _to_hf(a: Architecture) -> dict[str, Any]:
    return _common_to_hf(a) | {"architectures": ["Qwen3_5ForCausalLM"]}


def _moe_from_hf(hf: HFConfig) -> Architecture:
    whole = hf.part(intermediate_size=hf.size("moe_intermediate_size"), **_UNREAD)  # no layer is dense
    common = _common_from_hf(whole, Family.qwen3_5_moe_text)
    return replace(common, **_shared_expert(hf), **mixture.of_qwen(whole))


def _moe_to_hf(a: Architecture) -> dict[str, Any]:
    hf = _common_to_hf(a) | mixture.of_qwen_to_hf(a)
    hf |= {"shared_expert_intermediate_size": a.shared_ffn_hidden_size, "architectures": ["Qwen3_5MoeForCausalLM"]}
    return {key: value for key, value in hf.items() if key not in ("intermediate_size", *_UNREAD)}


FAMILIES = {
    Family.qwen3_next: HFFamily(_names(_TWO_PROJECTIONS, qwen.SHARED_EXPERTS, mapping.MLP), _next_from_hf, _next_to_hf),
    Family.qwen3_5_text: HFFamily(_names(_FOUR_PROJECTIONS, mapping.MLP, {}), _from_hf, _to_hf),
    Family.qwen3_5_moe_text: HFFamily(_names(_FOUR_PROJECTIONS, qwen.SHARED_EXPERTS, {}), _moe_from_hf, _moe_to_hf),
}
