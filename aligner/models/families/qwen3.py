"""Qwen3 (dense): Llama's layout with an RMSNorm on each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, qwen2
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import QK_NORM, llama_like

NAMES = llama_like(attention=QK_NORM)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases."""
    hf.only({"attention_bias": (False,)})
    common = llama.common_from_hf(hf, Family.qwen3, key_value_heads=qwen2.KEY_VALUE_HEADS, head_dim=128)
    return replace(common, qk_norm=True, **qwen2.upper_windows(hf))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    hf = llama.common_to_hf(architecture) | {"architectures": ["Qwen3ForCausalLM"]}
    return hf | {"attention_bias": False} | qwen2.windows_to_hf(architecture)
