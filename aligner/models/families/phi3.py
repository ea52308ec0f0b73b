"""Phi-3 (2404.14219) and Phi-4: Llama's layers, whose query, key and value are one matrix, as are gate and up.
LongRoPE (2402.13753) stretches the context of some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable
from aligner.models.families.rope_scaling import LONGROPE

NAMES = NameTable(
    before=mapping.BEFORE,
    layer=mapping.INPUT_NORM | mapping.PACKED_QKV | mapping.ATTENTION_OUT | mapping.MLP_NORM | mapping.PACKED_MLP,
    after=mapping.FINAL_NORM | mapping.OUTPUT,
)
_ORIGINAL_LENGTH = 4096  # of files that do not say
_FIXED = {"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for other scaled rotary embeddings than LongRoPE."""
    hf.only(_FIXED)
    original = hf.size("original_max_position_embeddings", absent=_ORIGINAL_LENGTH)
    hf = hf.part(original_max_position_embeddings=original)
    common = llama.common_from_hf(hf, Family.phi3, norm_eps=1e-5, fraction=1.0, rope_kinds=LONGROPE)
    return replace(common, **windows.everywhere(hf, absent=None))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": architecture.sliding_window or None,
        "original_max_position_embeddings": architecture.rope_original_length if architecture.rope_long_factors else _ORIGINAL_LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": None,
    }
