"""Mistral 7B (2310.06825) and its successors: Llama's layout, whose layers may all see a window only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import llama_like

NAMES = llama_like()


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for layers that differ, which are `ministral`'s."""
    hf.only({"layer_types": (None,)})
    common = llama.common_from_hf(hf, Family.mistral, key_value_heads=8)
    return replace(common, **windows.everywhere(hf, absent=4096))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    window = {"sliding_window": architecture.sliding_window or None}
    return llama.common_to_hf(architecture) | {"architectures": ["MistralForCausalLM"]} | window
