"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import QKV_BIAS, llama_like

NAMES = llama_like(attention=QKV_BIAS)
KEY_VALUE_HEADS = 32  # of files that do not say


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config."""
    return replace(llama.common_from_hf(hf, Family.qwen2, key_value_heads=KEY_VALUE_HEADS), qkv_bias=True, **upper_windows(hf))


def upper_windows(hf: HFConfig) -> dict[str, Any]:
    """The windows of Qwen2 and Qwen3: where they are on, of the layers from `max_window_layers`."""
    return switched_windows(hf, lambda number, bound: number >= bound)


def switched_windows(hf: HFConfig, has_window: Callable[[int, int], bool]) -> dict[str, Any]:
    """Windows with a switch. `has_window`: whether a layer, from 0, has one in a file that does not say, given its `max_window_layers`."""
    window = hf.optional_size("sliding_window", absent=4096) if hf.flag("use_sliding_window", False) else None
    bound, layers = int(hf.number("max_window_layers", 28)), range(hf.size("num_hidden_layers"))
    types = [windows.WINDOWED if window is not None and has_window(number, bound) else windows.FULL for number in layers]
    return windows.from_hf(hf, window, types)


def windows_to_hf(architecture: Architecture) -> dict[str, Any]:
    """The inverse of `switched_windows`."""
    if not architecture.sliding_window:
        return {"use_sliding_window": False}
    types = windows.layer_types(architecture)
    return {"use_sliding_window": True, "sliding_window": architecture.sliding_window, "layer_types": types}


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {"architectures": ["Qwen2ForCausalLM"]} | windows_to_hf(architecture)
