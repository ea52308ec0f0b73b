"""OLMo 2 (2501.00656): norms behind attention and the feed-forward layer only, and on all queries and all keys together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable

_NORMS = {name: one for name, one in mapping.SANDWICH_NORMS.items() if name.startswith("post_")}
NAMES = NameTable(
    before=mapping.BEFORE,
    layer=mapping.QKV | mapping.QK_NORM | mapping.ATTENTION_OUT | _NORMS | mapping.MLP,
    after=mapping.FINAL_NORM | mapping.OUTPUT,
)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases."""
    return common_from_hf(hf, Family.olmo2)


def common_from_hf(hf: HFConfig, family: Family, *, rope: Mapping[str, Any] | None = None) -> Architecture:
    """What OLMo 2 and 3 share."""
    hf.only({"attention_bias": (False,)})
    common = llama.common_from_hf(hf, family, norm_eps=1e-5, rope=rope)
    return replace(common, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return llama.common_to_hf(architecture) | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False}
