"""Cohere's Command R: attention and feed-forward layer side by side behind one norm, LayerNorm without biases, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family, Normalization, ParallelResidual
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, NameTable, rule

_QK_NORM = {f"self_attention.{one}_layernorm.weight": rule(f"self_attn.{one}_norm.weight", layout=Layout.by_head) for one in "qk"}
COMPUTED = ("logit_scale",)


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the norms that it has."""
    norms = _QK_NORM if architecture.qk_norm else {}
    layer = mapping.INPUT_NORM | mapping.QKV | norms | mapping.ATTENTION_OUT | mapping.MLP
    return NameTable(before=mapping.BEFORE, layer=layer, after=mapping.FINAL_NORM | mapping.OUTPUT)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases."""
    normed = hf.value("use_qk_norm") is not None and hf.flag("use_qk_norm", False)
    return replace(common_from_hf(hf, Family.cohere, theta=5e5), qk_norm=normed, qk_norm_by_head=normed)


def common_from_hf(hf: HFConfig, family: Family, *, theta: float) -> Architecture:
    """What Cohere 1 and 2 share; `theta`: of files that do not say."""
    hf.only({"attention_bias": (False,)})
    common = llama.common_from_hf(hf, family, theta=theta, norm_eps=1e-5, eps_name="layer_norm_eps", tied=True)
    return replace(
        common,
        normalization=Normalization.layer_norm_no_bias,
        parallel_residual=ParallelResidual.shared_norm,
        rotary_interleaved=True,
        logits_scale=hf.number("logit_scale", 0.0625),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return common_to_hf(architecture) | {"architectures": ["CohereForCausalLM"], "use_qk_norm": architecture.qk_norm}


def common_to_hf(architecture: Architecture) -> dict[str, Any]:
    """The inverse of `common_from_hf`."""
    hf = {key: value for key, value in llama.common_to_hf(architecture).items() if key != "rms_norm_eps"}
    return hf | {"layer_norm_eps": architecture.norm_eps, "logit_scale": architecture.logits_scale, "attention_bias": False}
