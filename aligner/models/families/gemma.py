"""Gemma without images. 2 (2408.00118): norms around attention and the feed-forward layer, capped scores and logits, windows in every other
layer. 3 (2503.19786): norms on queries and keys instead of caps, and a rotary base of their own for layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig, layer_types, two_ropes_to_hf
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable, Rule

_COMPUTED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_ACTIVATIONS = {"gelu_pytorch_tanh": Activation.gelu_tanh, "gelu_new": Activation.gelu_tanh, "gelu": Activation.gelu}
_LOCAL_THETA = 1e4
_FIXED = {"attention_bias": (False,), "use_bidirectional_attention": (None, False)}


def _names(attention: Mapping[str, Rule]) -> NameTable:
    """The table of Gemma 2 or 3; `attention` has the rows that its attention has besides."""
    layer = mapping.INPUT_NORM | mapping.QKV | dict(attention) | mapping.ATTENTION_OUT | mapping.SANDWICH_NORMS | mapping.MLP
    return NameTable(layer=layer)


def _common_from_hf(
    hf: HFConfig,
    family: Family,
    has_window: Callable[[int], Any],
    *,
    caps: tuple[float, float],
    rope: Mapping[str, Any] | None = None,
) -> Architecture:
    """What Gemma 2 and 3 share. `has_window` and `caps` (on scores and logits) are defaults."""
    hf.only(_FIXED)
    common = llama.common_from_hf(
        hf, family, key_value_heads=4, head_dim=256, tied=True, activation=("hidden_activation", _ACTIVATIONS), rope=rope
    )
    scalar = hf.size("query_pre_attn_scalar", absent=256)
    scores, logits = (hf.optional_number(key, cap) for key, cap in zip(_COMPUTED, caps, strict=False))
    return replace(
        common,
        normalization=Normalization.rms_norm_1p,
        post_norms=True,
        embedding_scale=math.sqrt(common.hidden_size),
        attention_scale=0.0 if scalar == common.head_dim else scalar**-0.5,
        attention_softcap=scores,
        logits_softcap=logits,
        **hf.windows(hf.optional_size("sliding_window", absent=4096), has_window),
    )


def _common_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `_common_from_hf`."""
    return {key: value for key, value in llama.common_to_hf(a).items() if key != "hidden_act"} | {
        "hidden_activation": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "attention_bias": False,
        "query_pre_attn_scalar": round(a.attention_scale**-2) if a.attention_scale else a.head_dim,
        "attn_logit_softcapping": a.attention_softcap or None,
        "final_logit_softcapping": a.logits_softcap or None,
        "sliding_window": a.sliding_window or 4096,
        "layer_types": layer_types(a),
    }


def _gemma3_from_hf(hf: HFConfig) -> Architecture:
    pattern = hf.size("sliding_window_pattern", absent=6)
    everywhere, local = hf.two_ropes(theta=1e6, local_theta=_LOCAL_THETA, local_name="rope_local_base_freq")
    common = _common_from_hf(hf, Family.gemma3_text, lambda number: (number + 1) % pattern, caps=(0.0, 0.0), rope=everywhere)
    return replace(common, qk_norm=True, rope_local_theta=local if common.sliding_window else 0.0)


def _gemma3_to_hf(a: Architecture) -> dict[str, Any]:
    local = a.rope_local_theta or _LOCAL_THETA
    own = {"rope_local_base_freq": local, "use_bidirectional_attention": False}
    return two_ropes_to_hf(_common_to_hf(a), local) | own


FAMILIES = {
    Family.gemma2: HFFamily(
        "Gemma2ForCausalLM",
        _names({}),
        lambda hf: _common_from_hf(hf, Family.gemma2, lambda number: number % 2 == 0, caps=(50.0, 30.0)),
        _common_to_hf,
        _COMPUTED,
    ),
    Family.gemma3_text: HFFamily("Gemma3ForCausalLM", _names(mapping.QK_NORM), _gemma3_from_hf, _gemma3_to_hf, _COMPUTED),
}
