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
    everywhere, local = windows.two_ropes(hf, theta=1e6, local_theta=_LOCAL_THETA, local_name="rope_local_base_freq")
    common = gemma2.common_from_hf(hf, Family.gemma3_text, types, caps=(0.0, 0.0), rope=everywhere)
    return replace(common, qk_norm=True, rope_local_theta=local if common.sliding_window else 0.0)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    local = architecture.rope_local_theta or _LOCAL_THETA
    own = {"rope_local_base_freq": local, "use_bidirectional_attention": False}
    return windows.two_ropes_to_hf(gemma2.common_to_hf(architecture), local) | own | {"architectures": ["Gemma3ForCausalLM"]}
