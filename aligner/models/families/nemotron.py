"""Nemotron-4 15B and 340B (2402.16819, 2406.11704): LayerNorm times 1 + weight, squared ReLU without a gate, half-rotated heads."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import NameTable, rule

NAMES = NameTable(
    before=mapping.BEFORE,
    layer=mapping.INPUT_NORM
    | {"input_layernorm.bias": rule("input_layernorm.bias")}
    | mapping.ATTENTION
    | mapping.MLP_NORM
    | {"pre_mlp_layernorm.bias": rule("post_attention_layernorm.bias")}
    | {"mlp.linear_fc1.weight": rule("mlp.up_proj.weight"), "mlp.linear_fc2.weight": rule("mlp.down_proj.weight")},
    after=mapping.FINAL_NORM | {"decoder.final_layernorm.bias": rule("model.norm.bias")} | mapping.OUTPUT,
)


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for biases, scaled rotary embeddings and other activations."""
    rope = hf.rope(fraction=0.5, kinds=())
    # Nemotron-4's own files say `rope_percent` too, which transformers does not read.
    hf.only(llama.BIASES | llama.DROPOUT | {"rope_percent": (rope["rotary_fraction"],)})
    heads = hf.size("num_attention_heads")
    return Architecture(
        family=Family.nemotron,
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hf.size("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=hf.size("num_key_value_heads", absent=heads, null=heads),
        head_dim=hf.size("head_dim", absent=0, null=0),
        ffn_hidden_size=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        norm_eps=hf.number("norm_eps", 1e-5),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.number("initializer_range", 0.0134),
        gated_mlp=False,
        activation=hf.choice("hidden_act", {"relu2": Activation.squared_relu}, "relu2"),
        normalization=Normalization.layer_norm_1p,
        **rope,
    )


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
