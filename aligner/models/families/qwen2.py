"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import QKV_BIAS, llama_like

NAMES = llama_like(attention=QKV_BIAS)
KEY_VALUE_HEADS = 32  # of files that do not say


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError where sliding-window attention is on."""
    full_attention(hf)
    return replace(llama.common_from_hf(hf, Family.qwen2, key_value_heads=KEY_VALUE_HEADS), qkv_bias=True)


def full_attention(hf: HFConfig) -> None:
    """Raise ConfigError where some layers see a window only."""
    hf.only({"use_sliding_window": (False,), "layer_types": (None, ["full_attention"] * hf.size("num_hidden_layers"))})


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
