"""DeepSeek-V2 (2405.04434): latent attention, and a mixture of many small experts chosen by their softmax, with groups or without."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import deepseek_v3, mixture
from aligner.models.families.hf_config import HFConfig

NAMES = deepseek_v3.NAMES
_FIXED = {"norm_topk_prob": (False,), "scoring_func": ("softmax",), "mlp_bias": (False,)}
_GROUPED = {"greedy": False, "group_limited_greedy": True}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases and other ways of routing."""
    hf.only(_FIXED)
    groups = hf.size("n_group") if hf.choice("topk_method", _GROUPED, "greedy") else 0
    routing = mixture.from_hf(hf, groups=groups, best=1, dense=0, scale=1.0, sigmoid=False)
    return deepseek_v3.common_from_hf(hf, Family.deepseek_v2, interleaved=True, routing=routing)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    method = next(name for name, grouped in _GROUPED.items() if grouped == bool(architecture.router_groups))
    own = {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}
    return deepseek_v3.common_to_hf(architecture) | own | {name: value for name, (value,) in _FIXED.items()}
