"""Qwen2 mixture of experts (2407.10671): Qwen2's attention, many small experts, and one with a gate that every token passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping, mixture, qwen
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable, llama_like, rule

_GATE = {"mlp.shared_experts.gate_weight": rule("mlp.shared_expert_gate.weight")}
EXPERTS = mapping.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj") | mixture.shared("mlp.shared_expert") | _GATE


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases that it has."""
    return llama_like(attention=mapping.QKV_BIAS if architecture.qkv_bias else {}, mlp=EXPERTS, dense=mapping.MLP)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config."""
    return replace(
        llama.common_from_hf(hf, Family.qwen2_moe, key_value_heads=16),
        qkv_bias=hf.flag("qkv_bias", True),
        shared_ffn_hidden_size=hf.size("shared_expert_intermediate_size", absent=5632),
        shared_expert_gate=True,
        **qwen.switched_windows(hf, lambda number, bound: number % 2 == 0 and number < bound),
        **mixture.of_qwen(hf),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    own = {"qkv_bias": a.qkv_bias, "shared_expert_intermediate_size": a.shared_ffn_hidden_size} | qwen.windows_to_hf(a)
    return llama.common_to_hf(a) | mixture.of_qwen_to_hf(a) | {"architectures": ["Qwen2MoeForCausalLM"]} | own
