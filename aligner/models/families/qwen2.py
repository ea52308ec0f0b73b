"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family
from aligner.models.families import llama
from aligner.models.families.names import QKV_BIAS, llama_like

NAMES = llama_like(attention=QKV_BIAS)


def from_hf(hf: dict[str, Any]) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError where sliding-window attention is on."""
    if hf.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported for model_type qwen2")
    return replace(llama.common_from_hf(hf, Family.qwen2), qkv_bias=True)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
