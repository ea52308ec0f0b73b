"""Qwen3.5 without images: Qwen3-Next's layers, whose delta nets have four projections; dense, or with a mixture of experts in every layer
whose weights are normalised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.models.config import Architecture, Family
from aligner.models.families import mapping, mixture, qwen2_moe, qwen3_next
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import Layout, rule

_PROJECTIONS = {
    "self_attention.linear_qkvz.weight": rule("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", layout=Layout.delta_qkvz),
    "self_attention.linear_ba.weight": rule("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight", layout=Layout.delta_ba),
}
_UNREAD = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # of Qwen's other mixtures


def _from_hf(hf: HFConfig) -> Architecture:
    return qwen3_next.common_from_hf(hf, Family.qwen3_5_text, key_value_heads=4)


def _to_hf(a: Architecture) -> dict[str, Any]:
    return qwen3_next.common_to_hf(a) | {"architectures": ["Qwen3_5ForCausalLM"]}


def _moe_from_hf(hf: HFConfig) -> Architecture:
    whole = hf.part(intermediate_size=hf.size("moe_intermediate_size"), **_UNREAD)  # no layer is dense
    common = qwen3_next.common_from_hf(whole, Family.qwen3_5_moe_text)
    return replace(common, **qwen3_next.shared_expert(hf), **mixture.of_qwen(whole))


def _moe_to_hf(a: Architecture) -> dict[str, Any]:
    hf = qwen3_next.common_to_hf(a) | mixture.of_qwen_to_hf(a)
    hf |= {"shared_expert_intermediate_size": a.shared_ffn_hidden_size, "architectures": ["Qwen3_5MoeForCausalLM"]}
    return {key: value for key, value in hf.items() if key not in ("intermediate_size", *_UNREAD)}


FAMILIES = {
    Family.qwen3_5_text: HFFamily(qwen3_next.names(_PROJECTIONS, mapping.MLP, {}), _from_hf, _to_hf),
    Family.qwen3_5_moe_text: HFFamily(qwen3_next.names(_PROJECTIONS, qwen2_moe.EXPERTS, {}), _moe_from_hf, _moe_to_hf),
}
