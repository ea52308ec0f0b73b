"""Qwen3.5 without images, dense: Qwen3-Next's layers, whose delta nets have four projections."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import mapping, qwen3_next
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, rule

PROJECTIONS = {
    "self_attention.linear_qkvz.weight": rule("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", layout=Layout.delta_qkvz),
    "self_attention.linear_ba.weight": rule("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight", layout=Layout.delta_ba),
}
NAMES = qwen3_next.names(PROJECTIONS, mapping.MLP, {})


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases on attention, and for YaRN."""
    return qwen3_next.common_from_hf(hf, Family.qwen3_5_text, key_value_heads=4)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return qwen3_next.common_to_hf(architecture) | {"architectures": ["Qwen3_5ForCausalLM"]}
