"""Qwen3.5's mixtures of experts without images: as Qwen3.5, with a mixture in every layer whose weights are normalised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import mixture, qwen2_moe, qwen3_5_text, qwen3_next
from aligner.models.families.hf_config import HFConfig

NAMES = qwen3_next.names(qwen3_5_text.PROJECTIONS, qwen2_moe.EXPERTS, {})
_UNREAD = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # of Qwen's other mixtures


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases on attention, and for YaRN."""
    whole = hf.part(intermediate_size=hf.size("moe_intermediate_size"), **_UNREAD)  # no layer is dense
    common = qwen3_next.common_from_hf(whole, Family.qwen3_5_moe_text)
    return replace(common, **qwen3_next.shared_expert(hf), **mixture.of_qwen(whole))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    hf = qwen3_next.common_to_hf(architecture) | mixture.of_qwen_to_hf(architecture)
    hf |= {"shared_expert_intermediate_size": architecture.shared_ffn_hidden_size, "architectures": ["Qwen3_5MoeForCausalLM"]}
    return {key: value for key, value in hf.items() if key not in ("intermediate_size", *_UNREAD)}
