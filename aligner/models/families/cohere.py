"""Cohere's Command R: attention and feed-forward layer side by side behind one norm, LayerNorm without biases, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family, Normalization, ParallelResidual
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable

NAMES = NameTable(
    before=mapping.BEFORE,
    layer=mapping.INPUT_NORM | mapping.ATTENTION | mapping.MLP,
    after=mapping.FINAL_NORM | mapping.OUTPUT,
)
COMPUTED = ("logit_scale",)
_FIXED = {"attention_bias": (False,), "use_qk_norm": (False, None)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for attention biases and for Command R+'s norms on queries and keys."""
    hf.only(_FIXED)
    common = llama.common_from_hf(hf, Family.cohere, theta=5e5, norm_eps=1e-5, eps_name="layer_norm_eps", tied=True)
    return replace(
        common,
        normalization=Normalization.layer_norm_no_bias,
        parallel_residual=ParallelResidual.shared_norm,
        rotary_interleaved=True,
        logits_scale=hf.number("logit_scale", 0.0625),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    hf = {key: value for key, value in llama.common_to_hf(architecture).items() if key != "rms_norm_eps"}
    own = {"layer_norm_eps": architecture.norm_eps, "logit_scale": architecture.logits_scale, "use_qk_norm": False}
    return hf | {"architectures": ["CohereForCausalLM"], "attention_bias": False} | own
