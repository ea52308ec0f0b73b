"""Cohere 2 (Command R7B, Command A; 2504.00698): Command R with windows in three of four layers, and positions in those alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import cohere, windows
from aligner.models.families.hf_config import HFConfig

NAMES = cohere.NAMES
COMPUTED = cohere.COMPUTED


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases, and where no layer has a window."""
    pattern = hf.size("sliding_window_pattern", absent=4)
    types = [windows.WINDOWED if (number + 1) % pattern else windows.FULL for number in range(hf.size("num_hidden_layers"))]
    seen = windows.from_hf(hf, hf.optional_size("sliding_window", absent=4096), types)
    if not seen:
        raise hf.refusal("layer_types", hf.value("layer_types"), f'at least one "{windows.WINDOWED}": no other layer has positions')
    common = cohere.common_from_hf(hf, Family.cohere2, theta=1e4)
    return replace(common, no_rope_layers=seen["full_attention_layers"], **seen)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    own = {"sliding_window": architecture.sliding_window, "layer_types": windows.layer_types(architecture)}
    return cohere.common_to_hf(architecture) | own | {"architectures": ["Cohere2ForCausalLM"]}
