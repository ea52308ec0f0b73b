"""Gemma 3 without images (2503.19786): Gemma 2 with norms on queries and keys instead of caps, and a rotary base of their own for layers
with a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import gemma2, windows
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import QK_NORM

NAMES = gemma2.names(QK_NORM)
COMPUTED = gemma2.COMPUTED
_LOCAL_THETA = 1e4


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases, attention in both directions, and scaled rotary
    embeddings of the layers with a window."""
    pattern = hf.size("sliding_window_pattern", absent=6)
    types = [windows.WINDOWED if (number + 1) % pattern else windows.FULL for number in range(hf.size("num_hidden_layers"))]
    everywhere, local = _rope(hf)
    common = gemma2.common_from_hf(hf, Family.gemma3_text, types, caps=(0.0, 0.0), rope=everywhere)
    return replace(common, qk_norm=True, rope_local_theta=local if common.sliding_window else 0.0)


def _rope(hf: HFConfig) -> tuple[dict[str, Any], float]:
    """(the fields of the layers without a window, the base of those with one)."""
    kinds = hf.value("rope_parameters") or {}
    if not isinstance(kinds, dict) or set(kinds) - {windows.FULL, windows.WINDOWED}:
        raise hf.refusal("rope_parameters", kinds, f'one object each for "{windows.FULL}" and "{windows.WINDOWED}"')
    scaling = hf.value("rope_scaling") or {}
    if not isinstance(scaling, dict) or (scaling and "rope_type" not in scaling):
        raise hf.refusal("rope_scaling", scaling, "an object with a rope_type")
    full, local = ((kinds.get(kind) or {}) for kind in (windows.FULL, windows.WINDOWED))
    if local.get("rope_type", "default") != "default":
        raise hf.refusal(f"rope_parameters.{windows.WINDOWED}.rope_type", local["rope_type"], '"default"')
    fields = hf.part(rope_parameters=dict(full) | scaling, rope_scaling=None).rope(theta=1e6)
    theta = hf.part(rope_parameters=local, rope_scaling=None).rope(theta=_LOCAL_THETA, names=("rope_local_base_freq", "none"))
    return fields, theta["rope_theta"]


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    local = architecture.rope_local_theta or _LOCAL_THETA
    hf = gemma2.common_to_hf(architecture)
    kinds = {windows.FULL: hf["rope_parameters"], windows.WINDOWED: {"rope_type": "default", "rope_theta": local}}
    own = {"rope_parameters": kinds, "rope_local_base_freq": local, "use_bidirectional_attention": False}
    return hf | own | {"architectures": ["Gemma3ForCausalLM"]}
