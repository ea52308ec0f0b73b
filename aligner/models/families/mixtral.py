"""Mixtral: Llama's layout with a mixture of experts in every layer; the chosen experts' weights sum to 1 (2401.04088, section 2.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import experts, llama_like

NAMES = llama_like(attention={}, mlp=experts("block_sparse_moe", gate="w1", up="w3", down="w2"))


_FIXED = {"router_jitter_noise": (0.0,)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError where noise in the router is on."""
    hf.only(_FIXED)
    return replace(
        llama.common_from_hf(hf, Family.mixtral, key_value_heads=8, theta=1e6, norm_eps=1e-5),
        num_experts=hf.size("num_local_experts", "num_experts", absent=8),
        experts_per_token=hf.size("num_experts_per_tok", absent=2),
        expert_ffn_hidden_size=hf.size("intermediate_size"),
        **windows.everywhere(hf, absent=None),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": architecture.expert_ffn_hidden_size,
        "num_local_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "sliding_window": architecture.sliding_window or None,
        "router_jitter_noise": 0.0,
    }
