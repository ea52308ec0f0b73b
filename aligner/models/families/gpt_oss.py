"""gpt-oss (2508.10925): attention sinks, windows in every other layer, and experts with biases and cut activations, all of a layer in one
tensor of its files. Published ones are in MXFP4, which is read; exports are not quantised.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from aligner.models.config import Activation, Architecture, Family
from aligner.models.families import llama, mapping, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, NameTable, llama_like, rule

_SINKS = {"self_attention.core_attention.sinks": rule("self_attn.sinks")}
_EXPERT = "mlp.experts.local_experts.{expert}."
_EXPERTS = mapping.affine("mlp.router", "mlp.router") | {
    f"{_EXPERT}linear_fc1.weight": rule("mlp.experts.gate_up_proj", layout=Layout.alternating_gate_up, transposed=True),
    f"{_EXPERT}linear_fc1.bias": rule("mlp.experts.gate_up_proj_bias", layout=Layout.alternating_gate_up),
    f"{_EXPERT}linear_fc2.weight": rule("mlp.experts.down_proj", transposed=True),
    f"{_EXPERT}linear_fc2.bias": rule("mlp.experts.down_proj_bias"),
}
# "silu" is what files say; the model computes another one whatever they say.
_ACTIVATION = "hidden_act", MappingProxyType({"silu": Activation.quick_gelu})
_FIXED = {"swiglu_alpha": (1.702,)}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases that it has."""
    biases = architecture.attention_out_bias
    out = (mapping.ATTENTION_OUT_BIAS if biases else {}) | _SINKS
    return llama_like(attention=mapping.QKV_BIAS if biases else {}, out=out, mlp=_EXPERTS)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for a slope of the activation other than 1.702."""
    hf.only(_FIXED)
    if not (limit := hf.number("swiglu_limit", 7.0)):
        raise hf.refusal("swiglu_limit", limit, "a number > 0")
    types = [windows.FULL if number % 2 else windows.WINDOWED for number in range(hf.size("num_hidden_layers"))]
    seen = windows.from_hf(hf, hf.optional_size("sliding_window", absent=128), types)
    scaled = hf if hf.value("rope_scaling") or hf.value("rope_parameters") is not None else hf.part(rope_parameters=_ROPE)
    common = llama.common_from_hf(
        hf, Family.gpt_oss, key_value_heads=8, head_dim=64, norm_eps=1e-5, activation=_ACTIVATION, rope=scaled.rope(theta=150000.0)
    )
    return replace(
        common,
        **seen,
        **dict.fromkeys(("qkv_bias", "attention_out_bias"), hf.flag("attention_bias", True)),
        attention_sinks=True,
        glu_limit=limit,
        glu_offset=1.0,
        expert_biases=True,
        num_experts=hf.size("num_local_experts", "num_experts", absent=128),
        experts_per_token=hf.size("num_experts_per_tok", absent=4),
        expert_ffn_hidden_size=common.ffn_hidden_size,
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    return llama.common_to_hf(a) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": a.attention_out_bias,
        "swiglu_alpha": 1.702,
        "swiglu_limit": a.glu_limit,
        "num_local_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "sliding_window": a.sliding_window or 128,
        "layer_types": windows.layer_types(a),
    }
