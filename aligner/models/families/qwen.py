"""Qwen2, 2.5 and 3: Llama's layout with biases on the query, key and value projections, or with an RMSNorm on each query and key head; and
their mixtures of experts (2407.10671): many small ones, Qwen2's beside one with a gate that every token passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping, mixture, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable, llama_like, rule

_KEY_VALUE_HEADS = 32  # of files that do not say
_FIXED = {"attention_bias": (False,)}


def _upper_windows(hf: HFConfig) -> dict[str, Any]:
    """The windows of Qwen2 and Qwen3: if they are on, of the layers from `max_window_layers`."""
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


def _qwen2_from_hf(hf: HFConfig) -> Architecture:
    return replace(llama.common_from_hf(hf, Family.qwen2, key_value_heads=_KEY_VALUE_HEADS), qkv_bias=True, **_upper_windows(hf))


def _qwen2_to_hf(a: Architecture) -> dict[str, Any]:
    return llama.common_to_hf(a) | {"architectures": ["Qwen2ForCausalLM"]} | windows_to_hf(a)


def _qwen3_from_hf(hf: HFConfig) -> Architecture:
    hf.only(_FIXED)
    common = llama.common_from_hf(hf, Family.qwen3, key_value_heads=_KEY_VALUE_HEADS, head_dim=128)
    return replace(common, qk_norm=True, **_upper_windows(hf))


def _qwen3_to_hf(a: Architecture) -> dict[str, Any]:
    return llama.common_to_hf(a) | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False} | windows_to_hf(a)


_EXPERTS = mapping.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
SHARED_EXPERTS = _EXPERTS | mixture.shared("mlp.shared_expert") | {"mlp.shared_experts.gate_weight": rule("mlp.shared_expert_gate.weight")}


def _qwen2_moe_names(architecture: Architecture) -> NameTable:
    return llama_like(attention=mapping.QKV_BIAS if architecture.qkv_bias else {}, mlp=SHARED_EXPERTS, dense=mapping.MLP)


def _qwen2_moe_from_hf(hf: HFConfig) -> Architecture:
    return replace(
        llama.common_from_hf(hf, Family.qwen2_moe, key_value_heads=16),
        qkv_bias=hf.flag("qkv_bias", True),
        shared_ffn_hidden_size=hf.size("shared_expert_intermediate_size", absent=5632),
        shared_expert_gate=True,
        **switched_windows(hf, lambda number, bound: number % 2 == 0 and number < bound),
        **mixture.of_qwen(hf),
    )


def _qwen2_moe_to_hf(a: Architecture) -> dict[str, Any]:
    own = {"qkv_bias": a.qkv_bias, "shared_expert_intermediate_size": a.shared_ffn_hidden_size} | windows_to_hf(a)
    return llama.common_to_hf(a) | mixture.of_qwen_to_hf(a) | {"architectures": ["Qwen2MoeForCausalLM"]} | own


# Qwen3's are in every layer, with a window for all layers or none.
def _qwen3_moe_from_hf(hf: HFConfig) -> Architecture:
    hf.only(_FIXED)
    return replace(
        llama.common_from_hf(hf, Family.qwen3_moe, key_value_heads=4),
        qk_norm=True,
        **(windows.everywhere(hf, absent=4096) if hf.flag("use_sliding_window", False) else {}),
        **mixture.of_qwen(hf),
    )


def _qwen3_moe_to_hf(a: Architecture) -> dict[str, Any]:
    own = {"use_sliding_window": bool(a.sliding_window), "sliding_window": a.sliding_window or None, "attention_bias": False}
    return llama.common_to_hf(a) | mixture.of_qwen_to_hf(a) | own | {"architectures": ["Qwen3MoeForCausalLM"]}


FAMILIES = {
    Family.qwen2: HFFamily(llama_like(attention=mapping.QKV_BIAS), _qwen2_from_hf, _qwen2_to_hf),
    Family.qwen3: HFFamily(llama_like(attention=mapping.QK_NORM), _qwen3_from_hf, _qwen3_to_hf),
    Family.qwen2_moe: HFFamily(_qwen2_moe_names, _qwen2_moe_from_hf, _qwen2_moe_to_hf),
    Family.qwen3_moe: HFFamily(
        llama_like(attention=mapping.QK_NORM, mlp=_EXPERTS, dense=mapping.MLP), _qwen3_moe_from_hf, _qwen3_moe_to_hf
    ),
}
