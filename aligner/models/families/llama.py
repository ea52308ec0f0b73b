"""Llama 2 and 3 (and models that copied their layout): RMSNorm, SwiGLU, rotary embeddings, grouped-query attention."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family
from aligner.models.families.names import llama_like

NAMES = llama_like(attention={})
# Megatron-Core applies Llama 3.1's rotary scaling with these constants; only the factor is a parameter there.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def from_hf(hf: dict[str, Any]) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for variants that Megatron-Core's layers do not compute."""
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ConfigError("config.json: attention_bias / mlp_bias = true is not supported for model_type llama")
    return common_from_hf(hf, Family.llama)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return common_to_hf(architecture) | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}


def common_from_hf(hf: dict[str, Any], family: Family) -> Architecture:
    """The fields that Llama and its descendants (Qwen2, Qwen3, Mixtral) share."""
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act={hf['hidden_act']!r}: only 'silu' is supported for model_type {family.value}")
    heads = hf["num_attention_heads"]
    theta, llama3_factor = rope_from_hf(hf)
    return Architecture(
        family=family,
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or 0,
        ffn_hidden_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_position_embeddings=hf["max_position_embeddings"],
        rope_theta=theta,
        rope_llama3_factor=llama3_factor,
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied_embeddings=hf.get("tie_word_embeddings", False),
        initializer_range=hf.get("initializer_range", 0.02),
    )


def common_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `common_from_hf`; `rope_theta` is written in the old and the new place, so that transformers 4 and 5 both read it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
    if a.rope_llama3_factor:
        rope |= {"rope_type": "llama3", "factor": a.rope_llama3_factor} | LLAMA3_ROPE
    return {
        "model_type": a.family.value,
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": a.rope_theta,
        "rope_scaling": rope if a.rope_llama3_factor else None,
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": a.initializer_range,
        "attention_dropout": 0.0,
    }


def rope_from_hf(hf: dict[str, Any]) -> tuple[float, float]:
    """(theta, Llama 3.1 scaling factor or 0). transformers 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, 0.0
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type={kind!r} is not supported; allowed: 'default', 'llama3'")
    for name, expected in LLAMA3_ROPE.items():
        if rope.get(name, expected) != expected:
            raise ConfigError(f"config.json: {name}={rope[name]} of rope_type 'llama3' is not supported; allowed: {expected}")
    return theta, float(rope["factor"])
