"""Qwen3 mixture of experts: Qwen3's attention, and many small experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import QK_NORM, experts, llama_like

NAMES = llama_like(attention=QK_NORM, mlp=experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"))


# Experts in every layer.
_FIXED = {"attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases and layers without experts."""
    hf.only(_FIXED)
    return replace(
        llama.common_from_hf(hf, Family.qwen3_moe, key_value_heads=4),
        qk_norm=True,
        **(windows.everywhere(hf, absent=4096) if hf.flag("use_sliding_window", False) else {}),
        num_experts=hf.size("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        experts_per_token=hf.size("num_experts_per_tok"),
        expert_ffn_hidden_size=hf.size("moe_intermediate_size"),
        normalize_expert_weights=hf.flag("norm_topk_prob", False),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": bool(architecture.sliding_window),
        "sliding_window": architecture.sliding_window or None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "moe_intermediate_size": architecture.expert_ffn_hidden_size,
        "norm_topk_prob": architecture.normalize_expert_weights,
    }
