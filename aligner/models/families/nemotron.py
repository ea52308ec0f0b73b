"""Nemotron-4 15B and 340B (2402.16819, 2406.11704): LayerNorm times 1 + weight, squared ReLU without a gate, half-rotated heads."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Activation, Architecture, Family, Normalization
from aligner.models.families import names
from aligner.models.families.llama import rope_from_hf
from aligner.models.families.mapping import NameTable, rule

NAMES = NameTable(
    before=names.BEFORE,
    layer=names.INPUT_NORM
    | {"input_layernorm.bias": rule("input_layernorm.bias")}
    | names.ATTENTION
    | names.MLP_NORM
    | {"pre_mlp_layernorm.bias": rule("post_attention_layernorm.bias")}
    | {"mlp.linear_fc1.weight": rule("mlp.up_proj.weight"), "mlp.linear_fc2.weight": rule("mlp.down_proj.weight")},
    after=names.FINAL_NORM | {"decoder.final_layernorm.bias": rule("model.norm.bias")} | names.OUTPUT,
)


def from_hf(hf: dict[str, Any]) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases, scaled rotary embeddings and other activations."""
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            raise ConfigError(f"config.json: {name}=true is not supported for model_type nemotron")
    if hf.get("hidden_act", "relu2") != "relu2":
        raise ConfigError(f"config.json: hidden_act={hf['hidden_act']!r}: only 'relu2' is supported for model_type nemotron")
    theta, llama3_factor = rope_from_hf(hf)
    if llama3_factor:
        raise ConfigError("config.json: rope_type='llama3' is not supported for model_type nemotron; allowed: 'default'")
    heads = hf["num_attention_heads"]
    return Architecture(
        family=Family.nemotron,
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or 0,
        ffn_hidden_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_position_embeddings=hf["max_position_embeddings"],
        rope_theta=theta,
        rotary_fraction=_rotary_fraction(hf),
        norm_eps=hf.get("norm_eps", 1e-5),
        tied_embeddings=hf.get("tie_word_embeddings", False),
        initializer_range=hf.get("initializer_range", 0.0134),
        gated_mlp=False,
        activation=Activation.squared_relu,
        normalization=Normalization.layer_norm_1p,
    )


def _rotary_fraction(hf: dict[str, Any]) -> float:
    """transformers 5 writes it into `rope_parameters`, version 4 beside it (Nemotron-4 files say `rope_percent` too); 0.5 where absent."""
    rope = hf.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", hf.get("rope_percent", 0.5)))


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    rope = {"rope_type": "default", "rope_theta": a.rope_theta, "partial_rotary_factor": a.rotary_fraction}
    return {
        "model_type": a.family.value,
        "architectures": ["NemotronForCausalLM"],
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": a.rope_theta,
        "partial_rotary_factor": a.rotary_fraction,
        "norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": "relu2",
        "initializer_range": a.initializer_range,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    }
