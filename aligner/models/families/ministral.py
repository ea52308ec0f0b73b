"""Ministral 8B: Mistral's layers, of which some see a window only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import llama_like

NAMES = llama_like()


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config."""
    window = hf.optional_size("sliding_window", absent=4096)
    types = [windows.FULL if window is None else windows.WINDOWED] * hf.size("num_hidden_layers")
    return replace(llama.common_from_hf(hf, Family.ministral, key_value_heads=8), **windows.from_hf(hf, window, types))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    own = {"sliding_window": architecture.sliding_window or None, "layer_types": windows.layer_types(architecture)}
    return llama.common_to_hf(architecture) | own | {"architectures": ["MinistralForCausalLM"]}
