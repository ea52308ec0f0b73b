"""Cohere's Command R: attention and feed-forward layer side by side behind one norm, LayerNorm without biases, scaled logits. Cohere 2
(Command R7B, Command A; 2504.00698): also windows in three of four layers, and positions in those alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family, Normalization, ParallelResidual
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import WINDOWED, HFConfig, layer_types
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import Layout, NameTable, rule

_QK_NORM = {f"self_attention.{one}_layernorm.weight": rule(f"self_attn.{one}_norm.weight", layout=Layout.by_head) for one in "qk"}
_COMPUTED = ("logit_scale",)


def _names(architecture: Architecture) -> NameTable:
    norms = _QK_NORM if architecture.qk_norm else {}
    layer = mapping.INPUT_NORM | mapping.QKV | norms | mapping.ATTENTION_OUT | mapping.MLP
    return NameTable(layer=layer)


def _common_from_hf(hf: HFConfig, family: Family, *, theta: float) -> Architecture:
    """What Cohere 1 and 2 share; `theta`: the default."""
    hf.only({"attention_bias": (False,)})
    common = llama.common_from_hf(hf, family, theta=theta, norm_eps=1e-5, eps_name="layer_norm_eps", tied=True)
    return replace(
        common,
        normalization=Normalization.layer_norm_no_bias,
        parallel_residual=ParallelResidual.shared_norm,
        rotary_interleaved=True,
        logits_scale=hf.number("logit_scale", 0.0625),
    )


def _common_to_hf(architecture: Architecture) -> dict[str, Any]:
    """The inverse of `_common_from_hf`."""
    hf = {key: value for key, value in llama.common_to_hf(architecture).items() if key != "rms_norm_eps"}
    return hf | {"layer_norm_eps": architecture.norm_eps, "logit_scale": architecture.logits_scale, "attention_bias": False}


def _cohere_from_hf(hf: HFConfig) -> Architecture:
    normed = hf.value("use_qk_norm") is not None and hf.flag("use_qk_norm", False)
    return replace(_common_from_hf(hf, Family.cohere, theta=5e5), qk_norm=normed, qk_norm_by_head=normed)


def _cohere2_from_hf(hf: HFConfig) -> Architecture:
    pattern = hf.size("sliding_window_pattern", absent=4)
    seen = hf.windows(hf.optional_size("sliding_window", absent=4096), lambda number: (number + 1) % pattern)
    if not seen:
        raise hf.refusal("layer_types", hf.value("layer_types"), f'at least one "{WINDOWED}": no other layer has positions')
    common = _common_from_hf(hf, Family.cohere2, theta=1e4)
    return replace(common, no_rope_layers=seen["full_attention_layers"], **seen)


FAMILIES = {
    Family.cohere: HFFamily(
        "CohereForCausalLM", _names, _cohere_from_hf, lambda a: _common_to_hf(a) | {"use_qk_norm": a.qk_norm}, _COMPUTED
    ),
    Family.cohere2: HFFamily(
        "Cohere2ForCausalLM",
        _names,
        _cohere2_from_hf,
        lambda a: _common_to_hf(a) | {"sliding_window": a.sliding_window, "layer_types": layer_types(a)},
        _COMPUTED,
    ),
}
