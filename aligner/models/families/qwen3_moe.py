"""Qwen3 mixture of experts: Qwen3's attention, and many small experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family
from aligner.models.families import llama
from aligner.models.families.names import QK_NORM, experts, llama_like

NAMES = llama_like(attention=QK_NORM, mlp=experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"))


def from_hf(hf: dict[str, Any]) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases, sliding-window attention and layers without experts."""
    for name in ("attention_bias", "use_sliding_window"):
        if hf.get(name):
            raise ConfigError(f"config.json: {name}=true is not supported for model_type qwen3_moe")
    if hf.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"config.json: decoder_sparse_step={hf['decoder_sparse_step']} is not supported; allowed: 1 (experts everywhere)")
    if hf.get("mlp_only_layers"):
        raise ConfigError(f"config.json: mlp_only_layers={hf['mlp_only_layers']} is not supported; allowed: [] (experts everywhere)")
    return replace(
        llama.common_from_hf(hf, Family.qwen3_moe),
        qk_norm=True,
        num_experts=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],  # transformers 5 writes the latter
        experts_per_token=hf["num_experts_per_tok"],
        expert_ffn_hidden_size=hf["moe_intermediate_size"],
        normalize_expert_weights=hf.get("norm_topk_prob", False),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "moe_intermediate_size": architecture.expert_ffn_hidden_size,
        "norm_topk_prob": architecture.normalize_expert_weights,
    }
