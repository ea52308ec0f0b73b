"""Dense models that differ from Llama by their norms, windows, biases and sums: Gemma, OLMo, Cohere's Command R and GLM-4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, ParallelResidual
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import WINDOWED, HFConfig, layer_types, two_ropes_to_hf
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import NameTable, rule

# Gemma without images. 2 (2408.00118): norms around attention and the feed-forward layer, capped scores and logits, windows in every other
# layer. 3 (2503.19786): norms on queries and keys instead of caps, and a rotary base of their own for layers with a window.
_GEMMA_COMPUTED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_ACTIVATIONS = {"gelu_pytorch_tanh": Activation.gelu_tanh, "gelu_new": Activation.gelu_tanh, "gelu": Activation.gelu}
_LOCAL_THETA = 1e4


def _gemma_names(a: Architecture) -> NameTable:
    return NameTable(layer=mapping.INPUT_NORM | mapping.attention(a) | mapping.SANDWICH_NORMS | mapping.MLP)


def _gemma_from_hf(
    hf: HFConfig,
    has_window: Callable[[int], Any],
    *,
    caps: tuple[float, float],
    rope: Mapping[str, Any] | None = None,
) -> Architecture:
    """What Gemma 2 and 3 share. `has_window` and `caps` (on scores and logits) are defaults."""
    hf.only({"use_bidirectional_attention": (None, False)})
    common = llama.common_from_hf(hf, key_value_heads=4, head_dim=256, tied=True, activation=("hidden_activation", _ACTIVATIONS), rope=rope)
    scalar = hf.size("query_pre_attn_scalar", absent=256)
    scores, logits = (hf.optional_number(key, cap) for key, cap in zip(_GEMMA_COMPUTED, caps, strict=False))
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


def _gemma_to_hf(a: Architecture) -> dict[str, Any]:
    return {key: value for key, value in llama.common_to_hf(a).items() if key != "hidden_act"} | {
        "hidden_activation": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "query_pre_attn_scalar": round(a.attention_scale**-2) if a.attention_scale else a.head_dim,
        "attn_logit_softcapping": a.attention_softcap or None,
        "final_logit_softcapping": a.logits_softcap or None,
        "sliding_window": a.sliding_window or 4096,
        "layer_types": layer_types(a),
    }


def _gemma3_from_hf(hf: HFConfig) -> Architecture:
    pattern = hf.size("sliding_window_pattern", absent=6)
    everywhere, local = hf.two_ropes(theta=1e6, local_theta=_LOCAL_THETA, local_name="rope_local_base_freq")
    common = _gemma_from_hf(hf, lambda number: (number + 1) % pattern, caps=(0.0, 0.0), rope=everywhere)
    return replace(common, qk_norm=True, rope_local_theta=local if common.sliding_window else 0.0)


def _gemma3_to_hf(a: Architecture) -> dict[str, Any]:
    local = a.rope_local_theta or _LOCAL_THETA
    return two_ropes_to_hf(_gemma_to_hf(a), local) | {"rope_local_base_freq": local, "use_bidirectional_attention": False}


# OLMo 2 (2501.00656): norms behind attention and the feed-forward layer only, and on all queries and all keys together. OLMo 3: also
# windows in three of four layers, whose rotary embedding nothing scales.
_NORMS = {name: one for name, one in mapping.SANDWICH_NORMS.items() if name.startswith("post_")}
_NAMES = NameTable(layer=mapping.QKV | mapping.QK_NORM | mapping.ATTENTION_OUT | _NORMS | mapping.MLP)
_THETA = 5e5  # OLMo 3's default


def _olmo2_from_hf(hf: HFConfig, rope: Mapping[str, Any] | None = None) -> Architecture:
    common = llama.common_from_hf(hf, norm_eps=1e-5, rope=rope)
    return replace(common, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True)


def _olmo3_from_hf(hf: HFConfig) -> Architecture:
    fields, local = hf.two_ropes(theta=_THETA, local_theta=_THETA, local_name="")
    common = _olmo2_from_hf(hf, fields)
    seen = hf.windows(hf.optional_size("sliding_window", absent=4096), lambda number: (number + 1) % 4)
    return replace(common, **seen, rope_local_theta=local if seen else 0.0)


def _olmo3_to_hf(a: Architecture) -> dict[str, Any]:
    hf = two_ropes_to_hf(llama.common_to_hf(a), a.rope_local_theta or _THETA)
    return hf | {"sliding_window": a.sliding_window or 4096, "layer_types": layer_types(a)}


# Cohere's Command R: attention and feed-forward layer side by side behind one norm, LayerNorm without biases, scaled logits. Cohere 2
# (Command R7B, Command A; 2504.00698): also windows in three of four layers, and positions in those alone.
_COHERE_COMPUTED = ("logit_scale",)


def _cohere_names(a: Architecture) -> NameTable:
    return NameTable(layer=mapping.INPUT_NORM | mapping.attention(a) | mapping.MLP)


def _cohere_common_from_hf(hf: HFConfig, *, theta: float) -> Architecture:
    """What Cohere 1 and 2 share; `theta`: the default."""
    common = llama.common_from_hf(hf, theta=theta, norm_eps=1e-5, eps_name="layer_norm_eps", tied=True)
    return replace(
        common,
        normalization=Normalization.layer_norm_no_bias,
        parallel_residual=ParallelResidual.shared_norm,
        rotary_interleaved=True,
        logits_scale=hf.number("logit_scale", 0.0625),
    )


def _cohere_to_hf(architecture: Architecture) -> dict[str, Any]:
    hf = {key: value for key, value in llama.common_to_hf(architecture).items() if key != "rms_norm_eps"}
    return hf | {"layer_norm_eps": architecture.norm_eps, "logit_scale": architecture.logits_scale}


def _cohere_from_hf(hf: HFConfig) -> Architecture:
    normed = hf.value("use_qk_norm") is not None and hf.flag("use_qk_norm", False)
    return replace(_cohere_common_from_hf(hf, theta=5e5), qk_norm=normed, qk_norm_by_head=normed)


def _cohere2_from_hf(hf: HFConfig) -> Architecture:
    pattern = hf.size("sliding_window_pattern", absent=4)
    seen = hf.windows(hf.optional_size("sliding_window", absent=4096), lambda number: (number + 1) % pattern)
    if not seen:
        raise hf.refusal("layer_types", hf.value("layer_types"), f'at least one "{WINDOWED}": no other layer has positions')
    common = _cohere_common_from_hf(hf, theta=1e4)
    return replace(common, no_rope_layers=seen["full_attention_layers"], **seen)


# GLM-4-0414: heads half of whose dimensions are rotated, in neighbouring pairs; norms around attention and the feed-forward layer.
_POST_ATTENTION = {"post_attention_layernorm.weight": rule("post_self_attn_layernorm.weight")}
_POST_MLP = {"post_mlp_layernorm.weight": rule("post_mlp_layernorm.weight")}


def _glm_names(a: Architecture) -> NameTable:
    attention = mapping.INPUT_NORM | mapping.attention(a) | _POST_ATTENTION
    return NameTable(layer=attention | mapping.MLP_NORM | mapping.PACKED_MLP | _POST_MLP)


def _glm_from_hf(hf: HFConfig) -> Architecture:
    common = llama.common_from_hf(hf, key_value_heads=2, head_dim=128, norm_eps=1.5625e-07, fraction=0.5)
    return replace(common, qkv_bias=hf.flag("attention_bias", True), post_norms=True, rotary_interleaved=True)


def glm_to_hf(a: Architecture) -> dict[str, Any]:
    """What GLM-4 and GLM-4.5 share."""
    return llama.common_to_hf(a, always_fraction=True) | {"attention_bias": a.qkv_bias}


FAMILIES = {
    Family.gemma2: HFFamily(
        "Gemma2ForCausalLM",
        _gemma_names,
        lambda hf: _gemma_from_hf(hf, lambda number: number % 2 == 0, caps=(50.0, 30.0)),
        _gemma_to_hf,
        llama.UNBIASED,
        _GEMMA_COMPUTED,
    ),
    Family.gemma3_text: HFFamily("Gemma3ForCausalLM", _gemma_names, _gemma3_from_hf, _gemma3_to_hf, llama.UNBIASED, _GEMMA_COMPUTED),
    Family.olmo2: HFFamily("Olmo2ForCausalLM", _NAMES, _olmo2_from_hf, llama.common_to_hf, llama.UNBIASED),
    Family.olmo3: HFFamily("Olmo3ForCausalLM", _NAMES, _olmo3_from_hf, _olmo3_to_hf, llama.UNBIASED),
    Family.cohere: HFFamily(
        "CohereForCausalLM",
        _cohere_names,
        _cohere_from_hf,
        lambda a: _cohere_to_hf(a) | {"use_qk_norm": a.qk_norm},
        llama.UNBIASED,
        _COHERE_COMPUTED,
    ),
    Family.cohere2: HFFamily(
        "Cohere2ForCausalLM",
        _cohere_names,
        _cohere2_from_hf,
        lambda a: _cohere_to_hf(a) | {"sliding_window": a.sliding_window, "layer_types": layer_types(a)},
        llama.UNBIASED,
        _COHERE_COMPUTED,
    ),
    Family.glm4: HFFamily(
        "Glm4ForCausalLM", _glm_names, _glm_from_hf, lambda a: glm_to_hf(a) | {"eos_token_id": None, "pad_token_id": None}
    ),
}
