"""Mixtral: Llama's layout with a mixture of experts in every layer; the chosen experts' weights sum to 1 (2401.04088, section 2.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family
from aligner.models.families import llama
from aligner.models.families.names import experts, llama_like

NAMES = llama_like(attention={}, mlp=experts("block_sparse_moe", gate="w1", up="w3", down="w2"))


def from_hf(hf: dict[str, Any]) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError where sliding-window attention is on."""
    if hf.get("sliding_window"):
        raise ConfigError(f"config.json: sliding_window={hf['sliding_window']} is not supported for model_type mixtral; allowed: null")
    # Absent fields have the values of transformers' MixtralConfig.
    common = llama.common_from_hf({"rms_norm_eps": 1e-5, "rope_theta": 1e6} | hf, Family.mixtral)
    return replace(
        common,
        num_experts=hf.get("num_local_experts", 8),
        experts_per_token=hf.get("num_experts_per_tok", 2),
        expert_ffn_hidden_size=hf["intermediate_size"],
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": architecture.expert_ffn_hidden_size,
        "num_local_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }
