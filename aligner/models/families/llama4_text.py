"""Llama 4 (Meta 2025), its text part: chunked attention with rotary positions in most layers, attention to everything without positions
in the others; a mixture of experts of which each token gets one, beside one that all tokens pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping, mixture
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, NameTable, rule
from aligner.models.families.rope_scaling import UNFACTORED

_BLOCK = "feed_forward"
_EXPERT = "mlp.experts.local_experts.{expert}."
_MIXTURE = {
    "mlp.router.weight": rule(f"{_BLOCK}.router.weight"),
    **mixture.shared(f"{_BLOCK}.shared_expert"),
    _EXPERT + "linear_fc1.weight": rule(f"{_BLOCK}.experts.gate_up_proj", layout=Layout.packed_gate_up, transposed=True),
    _EXPERT + "linear_fc2.weight": rule(f"{_BLOCK}.experts.down_proj", transposed=True),
}
_DENSE = {
    "mlp.linear_fc1.weight": rule(f"{_BLOCK}.gate_proj.weight", f"{_BLOCK}.up_proj.weight", layout=Layout.gate_up),
    "mlp.linear_fc2.weight": rule(f"{_BLOCK}.down_proj.weight"),
}
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_FIXED = {"num_experts_per_tok": (1,)}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases that it has."""
    biases, out = (mapping.QKV_BIAS, mapping.ATTENTION_OUT_BIAS) if architecture.qkv_bias else ({}, {})
    table = mapping.llama_like(attention=biases, out=out, mlp=_MIXTURE, dense=_DENSE)
    return replace(table, outer_prefix="language_model.", images=r"(?:vision_model|multi_modal_projector)\..*")


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for several experts per token, and for models without experts."""
    hf.only(_FIXED)
    layers = range(hf.size("num_hidden_layers"))
    common = llama.common_from_hf(hf, Family.llama4_text, key_value_heads=8, head_dim=128, theta=5e5, norm_eps=1e-5, rope_kinds=UNFACTORED)
    biases, experts = hf.flag("attention_bias", False), _moe_layers(hf, layers)
    rotates = hf.value("no_rope_layers") or _every(hf.size("no_rope_layer_interval", absent=4), layers)
    if not isinstance(rotates, list) or len(rotates) != len(layers) or any(one not in (0, 1) for one in rotates):
        raise hf.refusal("no_rope_layers", rotates, f"{len(layers)} times 1 (rotary positions) or 0 (none), one for each layer")
    types = hf.value("layer_types") or [_CHUNKED if rotates[layer] else _FULL for layer in layers]
    if not isinstance(types, list) or len(types) != len(layers) or any(kind not in (_CHUNKED, _FULL) for kind in types):
        raise hf.refusal("layer_types", types, f'{len(layers)} times "{_CHUNKED}" or "{_FULL}", one for each layer')
    tuned = hf.value("attn_temperature_tuning")
    if not (tuned is None or type(tuned) in (bool, int)):  # early files say 4, and mean true
        raise hf.refusal("attn_temperature_tuning", tuned, "true or false")
    chunks = _CHUNKED in types
    return replace(
        common,
        ffn_hidden_size=hf.size("intermediate_size_mlp", absent=16384),
        qkv_bias=biases,
        attention_out_bias=biases,
        rotary_interleaved=True,
        qk_l2_norm=hf.flag("use_qk_norm", True),
        attention_chunk=hf.size("attention_chunk_size", absent=8192) if chunks else 0,
        full_attention_layers=[layer for layer in layers if types[layer] == _FULL] if chunks else [],
        no_rope_layers=[layer for layer in layers if not rotates[layer]],
        attention_temperature=0.0 if tuned in (False, 0) else hf.number("attn_scale", 0.1),
        attention_temperature_length=hf.size("floor_scale", absent=8192),
        num_experts=hf.size("num_local_experts", absent=16),
        experts_per_token=1,
        expert_ffn_hidden_size=common.ffn_hidden_size,
        normalize_expert_weights=False,
        dense_layers=[layer for layer in layers if layer not in experts],
        shared_ffn_hidden_size=common.ffn_hidden_size,
        router_sigmoid=True,
        weighted_expert_inputs=True,
    )


def _moe_layers(hf: HFConfig, layers: range) -> list[int]:
    """Numbers of the layers with experts."""
    step, listed = hf.size("interleave_moe_layer_step", absent=1), hf.value("moe_layers")
    found = list(layers[step - 1 :: step]) if listed is None else listed
    if listed is None and not found:
        raise hf.refusal("interleave_moe_layer_step", step, f"at most num_hidden_layers={len(layers)}")
    if not isinstance(found, list) or not found or any(type(one) is not int or one not in layers for one in found):
        raise hf.refusal("moe_layers", listed, f"a list of layers' numbers, from 0 to {len(layers) - 1}, at least one")
    return found


def _every(interval: int, layers: range) -> list[int]:
    """0 for the last layer of each `interval`, 1 for the others."""
    return [int((layer + 1) % interval != 0) for layer in layers]


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a, layers = architecture, range(architecture.num_layers)
    return llama.common_to_hf(a) | {
        "architectures": ["Llama4ForCausalLM"],
        "attention_bias": a.attention_out_bias,
        "intermediate_size": a.expert_ffn_hidden_size,
        "intermediate_size_mlp": a.ffn_hidden_size,
        "use_qk_norm": a.qk_l2_norm,
        "attention_chunk_size": a.attention_chunk or 8192,
        "layer_types": [_CHUNKED if a.chunk_of(layer) else _FULL for layer in layers],
        "no_rope_layers": [int(a.rotates(layer)) for layer in layers],
        "attn_temperature_tuning": a.attention_temperature > 0,
        "attn_scale": a.attention_temperature or 0.1,
        "floor_scale": a.attention_temperature_length,
        "num_local_experts": a.num_experts,
        "num_experts_per_tok": 1,
        "moe_layers": [layer for layer in layers if a.has_experts(layer)],
    }
