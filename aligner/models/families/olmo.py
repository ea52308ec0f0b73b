"""OLMo 2 (2501.00656): norms behind attention and the feed-forward layer only, and on all queries and all keys together. OLMo 3: also
windows in three of four layers, whose rotary embedding nothing scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig, layer_types, two_ropes_to_hf
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable

_NORMS = {name: one for name, one in mapping.SANDWICH_NORMS.items() if name.startswith("post_")}
_NAMES = NameTable(layer=mapping.QKV | mapping.QK_NORM | mapping.ATTENTION_OUT | _NORMS | mapping.MLP)
_THETA = 5e5  # OLMo 3's default


def _olmo2_from_hf(hf: HFConfig, family: Family = Family.olmo2, rope: Mapping[str, Any] | None = None) -> Architecture:
    hf.only({"attention_bias": (False,)})
    common = llama.common_from_hf(hf, family, norm_eps=1e-5, rope=rope)
    return replace(common, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True)


def _olmo2_to_hf(a: Architecture) -> dict[str, Any]:
    return llama.common_to_hf(a) | {"attention_bias": False}


def _olmo3_from_hf(hf: HFConfig) -> Architecture:
    fields, local = hf.two_ropes(theta=_THETA, local_theta=_THETA, local_name="")
    common = _olmo2_from_hf(hf, Family.olmo3, fields)
    seen = hf.windows(hf.optional_size("sliding_window", absent=4096), lambda number: (number + 1) % 4)
    return replace(common, **seen, rope_local_theta=local if seen else 0.0)


def _olmo3_to_hf(a: Architecture) -> dict[str, Any]:
    own = {"sliding_window": a.sliding_window or 4096, "layer_types": layer_types(a)}
    hf = two_ropes_to_hf(_olmo2_to_hf(a), a.rope_local_theta or _THETA)
    return hf | own


FAMILIES = {
    Family.olmo2: HFFamily("Olmo2ForCausalLM", _NAMES, _olmo2_from_hf, _olmo2_to_hf),
    Family.olmo3: HFFamily("Olmo3ForCausalLM", _NAMES, _olmo3_from_hf, _olmo3_to_hf),
}
