"""Qwen3 mixture of experts: Qwen3's attention, and many small experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mixture, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import MLP, QK_NORM, experts, llama_like

NAMES = llama_like(attention=QK_NORM, mlp=experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"), dense=MLP)
_FIXED = {"attention_bias": (False,)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases."""
    hf.only(_FIXED)
    return replace(
        llama.common_from_hf(hf, Family.qwen3_moe, key_value_heads=4),
        qk_norm=True,
        **(windows.everywhere(hf, absent=4096) if hf.flag("use_sliding_window", False) else {}),
        **mixture.of_qwen(hf),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return (
        llama.common_to_hf(architecture)
        | mixture.of_qwen_to_hf(architecture)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "use_sliding_window": bool(architecture.sliding_window),
            "sliding_window": architecture.sliding_window or None,
        }
    )
