"""The weight names that Llama's descendants share: the rows from which their families' `NameTable`s are put together."""

from __future__ import annotations

from collections.abc import Mapping

from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, Layout, NameTable, Rule, rule

BEFORE = {EMBEDDING: rule("model.embed_tokens.weight", layout=Layout.vocabulary)}
FINAL_NORM = {"decoder.final_layernorm.weight": rule("model.norm.weight")}
OUTPUT = {OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)}
INPUT_NORM = {"input_layernorm.weight": rule("input_layernorm.weight")}
MLP_NORM = {"pre_mlp_layernorm.weight": rule("post_attention_layernorm.weight")}
QKV = {
    "self_attention.linear_qkv.weight": rule(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", layout=Layout.qkv
    )
}
ATTENTION_OUT = {"self_attention.linear_proj.weight": rule("self_attn.o_proj.weight")}
ATTENTION = QKV | ATTENTION_OUT
QKV_BIAS = {
    "self_attention.linear_qkv.bias": rule("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", layout=Layout.qkv)
}
QK_NORM = {
    "self_attention.q_layernorm.weight": rule("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rule("self_attn.k_norm.weight"),
}
MLP = {
    "mlp.linear_fc1.weight": rule("mlp.gate_proj.weight", "mlp.up_proj.weight", layout=Layout.gate_up),
    "mlp.linear_fc2.weight": rule("mlp.down_proj.weight"),
}


def experts(block: str, *, gate: str, up: str, down: str) -> dict[str, Rule]:
    """A mixture-of-experts layer whose router and experts are under `block`; the others name an expert's three projections."""
    expert = block + ".experts.{expert}."
    local = "mlp.experts.local_experts.{expert}."
    return {
        "mlp.router.weight": rule(f"{block}.gate.weight"),
        f"{local}linear_fc1.weight": rule(f"{expert}{gate}.weight", f"{expert}{up}.weight", layout=Layout.gate_up),
        f"{local}linear_fc2.weight": rule(f"{expert}{down}.weight"),
    }


def llama_like(*, attention: Mapping[str, Rule], mlp: Mapping[str, Rule] = MLP) -> NameTable:
    """Llama's table, with more rows for its attention and perhaps another feed-forward part.

    Biases of query, key and value come right behind their weights: what an engine fuses is to arrive together.
    """
    layer = INPUT_NORM | QKV | dict(attention) | ATTENTION_OUT | MLP_NORM | dict(mlp)
    return NameTable(before=BEFORE, layer=layer, after=FINAL_NORM | OUTPUT)
