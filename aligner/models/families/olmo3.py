"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary embedding nothing scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import olmo2, windows
from aligner.models.families.hf_config import HFConfig

NAMES = olmo2.NAMES
_THETA = 5e5


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases."""
    types = [windows.WINDOWED if (number + 1) % 4 else windows.FULL for number in range(hf.size("num_hidden_layers"))]
    fields, local = windows.two_ropes(hf, theta=_THETA, local_theta=_THETA, local_name="")
    common = olmo2.common_from_hf(hf, Family.olmo3, rope=fields)
    seen = windows.from_hf(hf, hf.optional_size("sliding_window", absent=4096), types)
    return replace(common, **seen, rope_local_theta=local if seen else 0.0)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    own = {"sliding_window": architecture.sliding_window or 4096, "layer_types": windows.layer_types(architecture)}
    hf = windows.two_ropes_to_hf(olmo2.to_hf(architecture), architecture.rope_local_theta or _THETA)
    return hf | own | {"architectures": ["Olmo3ForCausalLM"]}
