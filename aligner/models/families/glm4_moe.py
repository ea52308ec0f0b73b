"""GLM-4.5 (2508.06471): heads half of whose dimensions are rotated, and DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping, mixture
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable

_FIXED = {"norm_topk_prob": (True,)}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases and norms that it has."""
    biases = mapping.QKV_BIAS if architecture.qkv_bias else {}
    norms = mapping.QK_NORM if architecture.qk_norm else {}
    return mixture.names(architecture, mapping.QKV | biases | norms | mapping.ATTENTION_OUT)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for weights of experts that are not normalised."""
    hf.only(_FIXED)
    common = llama.common_from_hf(hf, Family.glm4_moe, key_value_heads=8, norm_eps=1e-5, fraction=0.5)
    routing = mixture.from_hf(hf, groups=hf.size("n_group", absent=1), best=2, dense=1, scale=1.0, sigmoid=True)
    return replace(common, qkv_bias=hf.flag("attention_bias", False), qk_norm=hf.flag("use_qk_norm", False), **routing)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    own = {"attention_bias": a.qkv_bias, "use_qk_norm": a.qk_norm, "partial_rotary_factor": a.rotary_fraction}
    hf = llama.common_to_hf(a) | mixture.to_hf(a) | {"architectures": ["Glm4MoeForCausalLM"]} | own
    hf["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    return hf
